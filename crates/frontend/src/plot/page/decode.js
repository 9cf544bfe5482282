// Reads what layer.rs wrote. Nothing here touches the document, so that Node can test it.

/** The weights of `count` codes: squares of whole steps, so that small weights keep their digits; the last is NaN. */
const weightsOfCodes = (count) =>
  Float32Array.from({ length: count }, (_, code) => (code === count - 1 ? NaN : (code / (count - 2)) ** 2));
const WEIGHTS = weightsOfCodes(65536);
const TILE_WEIGHTS = weightsOfCodes(256);

export function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** Largest first, weights that are not finite before all; of two alike the lower index first. */
export function sortEntries(entries) {
  const rank = ({ weight }) => (Number.isNaN(weight) ? Infinity : weight);
  return entries.sort((a, b) => rank(b) - rank(a) || a.index - b.index);
}

/** The statistics of one layer, its shape being `{ heads, queries, keys, top }`. */
export class Layer {
  constructor(bytes, shape, hasAllWeights) {
    let end = 0;
    const take = (Numbers, count) => {
      const start = end;
      end += count * Numbers.BYTES_PER_ELEMENT;
      if (end > bytes.length) throw new Error(`a layer has ${bytes.length} bytes, expected at least ${end}`);
      return new Numbers(bytes.buffer, bytes.byteOffset + start, count);
    };
    const { heads, queries, keys, top } = shape;
    this.shape = shape;
    this.received = take(Float32Array, heads * keys);
    this.entropy = take(Float32Array, heads * queries);
    this.topKeys = take(keys > 65536 ? Uint32Array : Uint16Array, heads * queries * top);
    this.topCodes = take(Uint16Array, heads * queries * top);
    this.tile = hasAllWeights ? take(Uint8Array, heads * queries * keys) : null;
    if (end !== bytes.length) throw new Error(`a layer has ${bytes.length} bytes, expected ${end}`);
  }

  /** The keys that a query reads, hidden ones left out, and the weight of all others together. */
  reads(head, query) {
    const { queries, keys, top } = this.shape;
    const entries = [];
    let [rest, last] = [1, 0];
    for (let i = (head * queries + query) * top, end = i + top; i < end; i++) {
      last = WEIGHTS[this.topCodes[i]];
      if (last !== 0) entries.push({ index: this.topKeys[i], weight: last });
      rest -= last;
    }
    // Keys come in the order of their weights: none is left where the last has none.
    return { entries: sortEntries(entries), rest: last === 0 || top === keys ? 0 : Math.max(0, rest) };
  }

  /** The queries among whose top keys a key is. */
  readers(head, key) {
    const { queries, top } = this.shape;
    const [start, end] = [head * queries * top, (head + 1) * queries * top];
    const entries = [];
    for (let i = this.topKeys.indexOf(key, start); i >= 0 && i < end; i = this.topKeys.indexOf(key, i + 1)) {
      const weight = WEIGHTS[this.topCodes[i]];
      if (weight !== 0) entries.push({ index: Math.floor((i - start) / top), weight });
    }
    return sortEntries(entries);
  }

  /** The weight of one key, or, with `isBound`, what it is at most. */
  weightAt(head, query, key) {
    const { queries, keys, top } = this.shape;
    const start = (head * queries + query) * top;
    for (let i = start; i < start + top; i++) {
      if (this.topKeys[i] === key) return { weight: WEIGHTS[this.topCodes[i]], isBound: false };
    }
    if (this.tile) return { weight: TILE_WEIGHTS[this.tile[(head * queries + query) * keys + key]], isBound: false };
    const least = WEIGHTS[this.topCodes[start + top - 1]];
    return { weight: least, isBound: least !== 0 };
  }

  /**
   * Calls `each(query, key, weight)` for all weights of a head that are known and not 0, of the queries and keys of a
   * window `{ query: [start, end], key: [start, end] }`.
   */
  forEach(head, { query: [firstQuery, endQuery], key: [firstKey, endKey] }, each) {
    const { queries, keys, top } = this.shape;
    for (let query = firstQuery; query < endQuery; query++) {
      const row = head * queries + query;
      if (this.tile) {
        for (let key = firstKey; key < endKey; key++) {
          const code = this.tile[row * keys + key];
          if (code !== 0) each(query, key, TILE_WEIGHTS[code]);
        }
      }
      for (let i = row * top; i < (row + 1) * top; i++) {
        const [key, code] = [this.topKeys[i], this.topCodes[i]];
        if (code !== 0 && key >= firstKey && key < endKey) each(query, key, WEIGHTS[code]);
      }
    }
  }

  /** The largest weight in each cell of a map of the window: rows of cells for queries, columns for keys. */
  largest(head, window, rows, columns) {
    const cells = new Float32Array(rows * columns);
    const { query, key } = window;
    const [down, across] = [rows / (query[1] - query[0]), columns / (key[1] - key[0])];
    this.forEach(head, window, (q, k, weight) => {
      const cell = Math.floor((q - query[0]) * down) * columns + Math.floor((k - key[0]) * across);
      if (Number.isNaN(weight) || weight > cells[cell]) cells[cell] = weight;
    });
    return cells;
  }

  /** The share of their weight that blocks of queries give to blocks of keys, by their top keys. */
  coarse(head, rows, columns) {
    const { queries, keys, top } = this.shape;
    const cells = new Float32Array(rows * columns);
    const column = Uint16Array.from({ length: keys }, (_, key) => Math.floor((key * columns) / keys));
    let i = head * queries * top;
    for (let query = 0; query < queries; query++) {
      const row = Math.floor((query * rows) / queries);
      for (const end = i + top; i < end; i++) cells[row * columns + column[this.topKeys[i]]] += WEIGHTS[this.topCodes[i]];
    }
    return cells.map((sum) => (sum * rows) / queries);
  }

  /** Of one head: the mean entropy, the largest weight, weights that are not finite, what top keys have of all weight. */
  summary(head) {
    const { queries, keys, top } = this.shape;
    const found = { entropy: 0, largest: 0, notFinite: 0, top: 0, all: 0, mostRead: 0 };
    for (let i = head * queries * top; i < (head + 1) * queries * top; i++) {
      const weight = WEIGHTS[this.topCodes[i]];
      if (Number.isNaN(weight)) found.notFinite++;
      else [found.top, found.largest] = [found.top + weight, Math.max(found.largest, weight)];
    }
    for (let q = head * queries; q < (head + 1) * queries; q++) found.entropy += this.entropy[q] / queries;
    const received = this.received.subarray(head * keys, (head + 1) * keys);
    for (let key = 0; key < keys; key++) {
      found.all += received[key];
      if (received[key] > received[found.mostRead]) found.mostRead = key;
    }
    return found;
  }
}

/**
 * What `entriesOf(layer, head)` finds in each head, summed by index: the mean weight over all heads, and the head in
 * which it is largest.
 */
export function overHeads(layers, heads, entriesOf) {
  const found = new Map();
  layers.forEach((layer, l) => {
    for (let head = 0; head < heads; head++) {
      for (const { index, weight } of entriesOf(layer, head)) {
        const sum = found.get(index) ?? { index, weight: 0, best: { layer: l, head, weight: -1 } };
        sum.weight += weight / (layers.length * heads);
        if (weight > sum.best.weight) sum.best = { layer: l, head, weight };
        found.set(index, sum);
      }
    }
  });
  return sortEntries([...found.values()]);
}

/** `0`, `0.123`, or `4.5e-5` for what three digits would not show. */
export function textOf(weight) {
  if (!Number.isFinite(weight)) return "not finite";
  return weight === 0 ? "0" : weight < 0.001 ? weight.toExponential(1) : weight.toFixed(3);
}

/** The whole numbers and words of an address such as `#layer=3&head=5&as=map`, with what is wrong with it. */
export function parseAddress(hash, limits) {
  const [found, problems] = [{}, []];
  for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    const limit = limits[name];
    if (Array.isArray(limit) && limit.includes(text)) found[name] = text;
    else if (Number.isInteger(limit) && /^\d{1,9}$/.test(text) && Number(text) < limit) found[name] = Number(text);
    else if (Array.isArray(limit)) problems.push(`${name} is one of ${limit.join(", ")}, not “${text}”`);
    else if (limit > 0) problems.push(`${name} is a number from 0 to ${limit - 1}, not “${text}”`);
    else problems.push(`there is no ${name} here`);
  }
  return { found, problems };
}
