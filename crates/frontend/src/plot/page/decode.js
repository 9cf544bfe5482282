// Decodes the bytes that mod.rs writes. Nothing here touches the document, so that Node can test it.

/** The weight of a code: the square of whole steps, so that small weights keep their digits; `last` is for NaN. */
const weightOfCode = (code, last) => (code === last ? NaN : (code / (last - 1)) ** 2);
export const bytesOfBase64 = (text) =>
  Uint8Array.fromBase64?.(text) ?? Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

/** Orders the largest weights first, those that are not finite before all others, and equal ones by their index. */
export function sortByWeight(entries) {
  const rank = ({ weight }) => (Number.isNaN(weight) ? 2 : weight);
  return entries.sort((a, b) => rank(b) - rank(a) || a.index - b.index);
}

/** The statistics of a layer. A window of it is `[first, end]` of queries and of keys: `[[0, queries], [0, keys]]`. */
export class Layer {
  constructor(bytes, shape, hasAllWeights) {
    let end = 0;
    const takeNext = (Numbers, count) => {
      const numbers = new Numbers(bytes.buffer, bytes.byteOffset + end, count);
      end += numbers.byteLength;
      return numbers;
    };
    const { heads, queries, keys, top } = shape;
    this.shape = shape;
    this.received = takeNext(Float32Array, heads * keys);
    this.entropy = takeNext(Float32Array, heads * queries);
    this.topKeys = takeNext(keys > 65536 ? Uint32Array : Uint16Array, heads * queries * top);
    this.topCodes = takeNext(Uint16Array, heads * queries * top);
    this.allCodes = hasAllWeights ? takeNext(Uint8Array, heads * queries * keys) : null;
    this.isComplete = hasAllWeights || top === keys;
    if (end !== bytes.length) throw new Error(`a layer has ${bytes.length} bytes, expected ${end}`);
  }

  /** Calls `visit(query, key, weight)` for the top keys of queries in a window, where their weight is not 0. */
  forEachTop(head, [[firstQuery, endQuery], [firstKey, endKey]], visit) {
    const { queries, top } = this.shape;
    const [keys, codes, firstRow] = [this.topKeys, this.topCodes, head * queries];
    for (let i = (firstRow + firstQuery) * top; i < (firstRow + endQuery) * top; i++) {
      if (codes[i] === 0 || keys[i] < firstKey || keys[i] >= endKey) continue;
      visit(Math.floor(i / top) - firstRow, keys[i], weightOfCode(codes[i], 65535));
    }
  }

  /** Calls `visit(query, key, weight)` for weights in a window that are known and not 0; the most exact come last. */
  forEach(head, window, visit) {
    const { queries, keys } = this.shape;
    const [[firstQuery, endQuery], [firstKey, endKey]] = window;
    for (let query = firstQuery; this.allCodes && query < endQuery; query++) {
      for (let key = firstKey; key < endKey; key++) {
        const code = this.allCodes[(head * queries + query) * keys + key];
        if (code !== 0) visit(query, key, weightOfCode(code, 255));
      }
    }
    this.forEachTop(head, window, visit);
  }

  /** `{ index, weight }` of the top keys of a query, or of the queries that have a key among their top keys. */
  partners(side, head, index) {
    const [entries, isQuery, { queries, keys }] = [[], side === "query", this.shape];
    const window = isQuery ? [[index, index + 1], [0, keys]] : [[0, queries], [index, index + 1]];
    this.forEachTop(head, window, (query, key, weight) => entries.push({ index: isQuery ? key : query, weight }));
    return entries;
  }

  /** The weights of a query besides its top keys: the sum of all others, and the most that one of them can have. */
  othersOf(head, query) {
    const { keys, top } = this.shape;
    const entries = this.partners("query", head, query);
    // Keys are in the order of their weights: if the last weight is 0, so are all others. NaN tells nothing.
    const most = (top < keys && entries[top - 1]?.weight) || 0;
    const sum = entries.reduce((rest, { weight }) => rest - weight, 1);
    return { most, sum: most && sum > 0 ? sum : 0 };
  }

  /** The weight of a key or, with `isBound`, an upper bound of it; without a query, the mean weight of the key. */
  weightAt(head, query, key) {
    if (query === null) return { weight: this.received[head * this.shape.keys + key] / this.shape.queries, isBound: false };
    let weight = this.isComplete ? 0 : null;
    this.forEach(head, [[query, query + 1], [key, key + 1]], (_query, _key, known) => (weight = known));
    if (weight !== null) return { weight, isBound: false };
    const { most } = this.othersOf(head, query);
    return { weight: most, isBound: most !== 0 };
  }

  /** A map of a window: a cell is the largest weight of `perCell` queries, which are rows, and keys. */
  largest(head, window, perCell) {
    const [rows, columns] = window.map(([first, end], side) => Math.ceil((end - first) / perCell[side]));
    const weights = new Float32Array(rows * columns);
    this.forEach(head, window, (query, key, weight) => {
      const row = Math.floor((query - window[0][0]) / perCell[0]);
      const cell = row * columns + Math.floor((key - window[1][0]) / perCell[1]);
      if (Number.isNaN(weight) || weight > weights[cell]) weights[cell] = weight;
    });
    return { rows, columns, weights };
  }

  /** Summarises a head: mean entropy, largest weight, top weights not finite, weight of top keys and of all. */
  summary(head) {
    const { queries, keys } = this.shape;
    const found = { entropy: 0, largest: 0, notFinite: 0, top: 0, all: 0, mostRead: 0 };
    this.forEachTop(head, [[0, queries], [0, keys]], (_query, _key, weight) => {
      if (Number.isNaN(weight)) found.notFinite++;
      else found.top += weight;
      if (weight > found.largest) found.largest = weight;
    });
    for (const entropy of this.entropy.subarray(head * queries, (head + 1) * queries)) found.entropy += entropy / queries;
    this.received.subarray(head * keys, (head + 1) * keys).forEach((weight, key, received) => {
      found.all += weight;
      if (weight > received[found.mostRead]) found.mostRead = key;
    });
    return found;
  }
}

/** The mean over heads of `entriesOf(head)`, largest first, each entry with the head that has the most of it. */
export function meanOverHeads(heads, entriesOf) {
  const found = {};
  for (const head of heads) {
    for (const { index, weight } of entriesOf(head)) {
      const entry = (found[index] ??= { index, weight: 0, most: 0, head });
      entry.weight += weight / heads.length;
      if (weight > entry.most) Object.assign(entry, { most: weight, head });
    }
  }
  return sortByWeight(Object.values(found));
}

/** Formats a weight: `0`, `0.123`, or `4.5e-5` if three digits are too few. */
export function textOf(weight) {
  if (!Number.isFinite(weight)) return "not finite";
  return weight === 0 ? "0" : weight < 0.001 ? weight.toExponential(1) : weight.toFixed(3);
}

/** Parses an address such as `#layer=3&as=map`: numbers below a limit, or words of a list; others are problems. */
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
