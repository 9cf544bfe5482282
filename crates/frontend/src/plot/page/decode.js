// Reads what layer.rs wrote. Nothing here touches the document, so that Node can test it.

/** The weights of `count` codes: squares of whole steps, so that small weights keep their digits; the last is NaN. */
const weightsOfCodes = (count) =>
  Float32Array.from({ length: count }, (_, code) => (code === count - 1 ? NaN : (code / (count - 2)) ** 2));
const WEIGHTS = weightsOfCodes(65536);
const TILE_WEIGHTS = weightsOfCodes(256);

export const bytesOf = (base64) =>
  Uint8Array.fromBase64?.(base64) ?? Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));

/** Largest first, weights that are not finite before all; of two alike the lower index first. */
function sorted(entries) {
  const rank = ({ weight }) => (Number.isNaN(weight) ? 2 : weight);
  return entries.sort((a, b) => rank(b) - rank(a) || a.index - b.index);
}

/** The statistics of one layer, its shape being `{ heads, queries, keys, top }`. */
export class Layer {
  constructor(bytes, shape, hasAllWeights) {
    let end = 0;
    const take = (Numbers, count) => {
      const start = end;
      end += count * Numbers.BYTES_PER_ELEMENT;
      return new Numbers(bytes.buffer, bytes.byteOffset + start, count);
    };
    const { heads, queries, keys, top } = shape;
    this.shape = shape;
    this.received = take(Float32Array, heads * keys);
    this.entropy = take(Float32Array, heads * queries);
    this.topKeys = take(keys > 65536 ? Uint32Array : Uint16Array, heads * queries * top);
    this.topCodes = take(Uint16Array, heads * queries * top);
    this.tile = hasAllWeights ? take(Uint8Array, heads * queries * keys) : null;
    this.isComplete = hasAllWeights || top === keys;
    if (end !== bytes.length) throw new Error(`a layer has ${bytes.length} bytes, expected ${end}`);
  }

  /** The keys that a query reads, hidden ones left out; what all others have together, and what each has at most. */
  reads(head, query) {
    const { queries, keys, top } = this.shape;
    const entries = [];
    let [rest, least] = [1, 0];
    for (let i = (head * queries + query) * top, end = i + top; i < end; i++) {
      least = WEIGHTS[this.topCodes[i]];
      if (least !== 0) entries.push({ index: this.topKeys[i], weight: least });
      rest -= least;
    }
    // Keys come in the order of their weights: no other has any if the last has none. Of NaN nothing is known.
    if (!(least > 0) || top === keys) [rest, least] = [0, 0];
    return { entries: sorted(entries), rest: rest > 0 ? rest : 0, least };
  }

  /** Calls `each(query, weight)` for the queries among whose top keys a key is: those of a sink are all. */
  forEachReader(head, key, each) {
    const { queries, top } = this.shape;
    const [start, end] = [head * queries * top, (head + 1) * queries * top];
    const [keys, codes] = [this.topKeys, this.topCodes];
    for (let i = start; i < end; i++) {
      if (keys[i] === key && codes[i] !== 0) each(Math.floor((i - start) / top), WEIGHTS[codes[i]]);
    }
  }

  /** Those queries, by weight. */
  readers(head, key) {
    const entries = [];
    this.forEachReader(head, key, (index, weight) => entries.push({ index, weight }));
    return sorted(entries);
  }

  /** The weight of one key, or, with `isBound`, what it is at most. */
  weightAt(head, query, key) {
    const { entries, least } = this.reads(head, query);
    const found = entries.find(({ index }) => index === key);
    if (found) return { weight: found.weight, isBound: false };
    const { queries, keys } = this.shape;
    if (this.tile) return { weight: TILE_WEIGHTS[this.tile[(head * queries + query) * keys + key]], isBound: false };
    return { weight: least, isBound: least !== 0 };
  }

  /** Calls `each(query, key, weight)` for the weights that are known and not 0, from first to end of both sides. */
  forEach(head, { query: [firstQuery, endQuery], key: [firstKey, endKey] }, each) {
    const { queries, keys, top } = this.shape;
    for (let query = firstQuery; query < endQuery; query++) {
      const row = head * queries + query;
      for (let key = firstKey; this.tile && key < endKey; key++) {
        const code = this.tile[row * keys + key];
        if (code !== 0) each(query, key, TILE_WEIGHTS[code]);
      }
      for (let i = row * top; i < (row + 1) * top; i++) {
        const [key, code] = [this.topKeys[i], this.topCodes[i]];
        if (code !== 0 && key >= firstKey && key < endKey) each(query, key, WEIGHTS[code]);
      }
    }
  }

  /** A map of a window as above: the largest weight of `per.query` queries, which are rows, and `per.key` keys. */
  largest(head, window, per) {
    const { query, key } = window;
    const [rows, columns] = [(query[1] - query[0]) / per.query, (key[1] - key[0]) / per.key].map(Math.ceil);
    const weights = new Float32Array(rows * columns);
    this.forEach(head, window, (q, k, weight) => {
      const cell = Math.floor((q - query[0]) / per.query) * columns + Math.floor((k - key[0]) / per.key);
      if (Number.isNaN(weight) || weight > weights[cell]) weights[cell] = weight;
    });
    return { rows, columns, weights };
  }

  /** Of a head: mean entropy, largest weight, top weights that are not finite, the weight of top and of all keys. */
  summary(head) {
    const { queries, keys, top } = this.shape;
    const found = { entropy: 0, largest: 0, notFinite: 0, top: 0, all: 0, mostRead: 0 };
    for (const code of this.topCodes.subarray(head * queries * top, (head + 1) * queries * top)) {
      if (code === 65535) found.notFinite++;
      else found.top += WEIGHTS[code];
      if (WEIGHTS[code] > found.largest) found.largest = WEIGHTS[code];
    }
    for (const entropy of this.entropy.subarray(head * queries, (head + 1) * queries)) found.entropy += entropy / queries;
    this.received.subarray(head * keys, (head + 1) * keys).forEach((weight, key, received) => {
      found.all += weight;
      if (weight > received[found.mostRead]) found.mostRead = key;
    });
    return found;
  }
}

/**
 * What `visit(head, each)` calls `each(index, weight)` with, for indices below `count`: the mean weight over the heads,
 * and of the head with the most, `most` and `head`.
 */
export function overHeads(heads, count, visit) {
  const [sums, most, best] = [new Float64Array(count), new Float64Array(count), new Uint32Array(count)];
  heads.forEach((head, number) => visit(head, (index, weight) => {
    sums[index] += weight / heads.length;
    if (weight > most[index]) [most[index], best[index]] = [weight, number];
  }));
  const found = [];
  sums.forEach((weight, index) => weight !== 0 && found.push({ index, weight, most: most[index], head: heads[best[index]] }));
  return sorted(found);
}

/** `0`, `0.123`, or `4.5e-5` where three digits would not do. */
export function textOf(weight) {
  if (!Number.isFinite(weight)) return "not finite";
  return weight === 0 ? "0" : weight < 0.001 ? weight.toExponential(1) : weight.toFixed(3);
}

/** What an address such as `#layer=3&as=map` says: numbers below a limit, or words of a list; others are problems. */
export function parseAddress(hash, limits) {
  const [found, problems] = [{}, []];
  for (const [name, text] of new URLSearchParams(hash.slice(1))) {
    const limit = limits[name];
    if (limit?.includes?.(text)) found[name] = text;
    else if (/^\d{1,9}$/.test(text) && Number(text) < limit) found[name] = Number(text);
    else problems.push(`${name}=${text}${limit > 0 ? ` (the last is ${limit - 1})` : ""}`);
  }
  return { found, problems };
}
