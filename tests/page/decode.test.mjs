// Node's tests of `decode.js`: `node --test tests/page/decode.test.mjs`.

import assert from "node:assert/strict";
import { test } from "node:test";
import { readFileSync } from "node:fs";

const source = readFileSync(new URL("../../crates/frontend/src/plot/page/decode.js", import.meta.url), "utf8");
const script = await import(`data:text/javascript,${encodeURIComponent(source)}`);
const { Layer, bytesOfBase64, meanOverHeads, parseAddress, sortByWeight, textOf } = script;

const shape = { heads: 1, queries: 3, keys: 4, top: 2 };
const code = (weight) => Math.round(Math.sqrt(weight) * 65534);
// Query 0 attends to key 0 alone, query 1 to keys 2, 1 and others; query 2 has a weight that is not a number.
const bytes = (tile = []) => {
  const parts = [
    Float32Array.of(1, 0.25, 0.5, 0.25), Float32Array.of(0, 1.5, NaN), Uint16Array.of(0, 1, 2, 1, 3, 0),
    Uint16Array.of(code(1), 0, code(0.5), code(0.25), 65535, code(0.25)), Uint8Array.from(tile),
  ];
  return new Uint8Array(Buffer.concat(parts.map((part) => Buffer.from(part.buffer))));
};
const layer = new Layer(bytes(), shape, false);
const near = (found, expected) => assert.ok(Math.abs(found - expected) < 2e-5, `${found} is not ${expected}`);

test("what a query reads comes largest first, without hidden keys", () => {
  const reads = (query) => sortByWeight(layer.partners("query", 0, query));
  const [entries, { sum, most }] = [reads(1), layer.othersOf(0, 1)];
  assert.deepEqual(entries.map(({ index }) => index), [2, 1]);
  [entries[0].weight - 0.5, entries[1].weight - 0.25, sum - 0.25, most - 0.25].forEach((off) => near(off, 0));
  assert.deepEqual([reads(0), layer.othersOf(0, 0)], [[{ index: 0, weight: 1 }], { sum: 0, most: 0 }]);
  assert.ok(Number.isNaN(reads(2)[0].weight));
});

test("a key has readers, and none in another head", () => {
  assert.deepEqual(layer.partners("key", 0, 0).map(({ index }) => index), [0, 2]);
  assert.deepEqual(layer.partners("key", 0, 1).map(({ index }) => index), [1]);
});

test("a weight is known, or bounded by the least of the top keys", () => {
  near(layer.weightAt(0, 1, 1).weight, 0.25);
  assert.deepEqual(layer.weightAt(0, 0, 3), { weight: 0, isBound: false });
  const { weight, isBound } = layer.weightAt(0, 1, 3);
  near(weight, 0.25);
  assert.ok(isBound);
  const tile = new Layer(bytes([254, 0, 0, 0, 0, 0, 0, 127, 0, 0, 0, 255]), shape, true);
  near(tile.weightAt(0, 1, 3).weight, 0.25);
  assert.equal(tile.weightAt(0, 1, 3).isBound, false);
});

test("a cell of a map has its largest weight", () => {
  const { rows, columns, weights } = layer.largest(0, [[0, 3], [0, 4]], [1, 2]);
  assert.deepEqual([rows, columns], [3, 2]);
  [1, 0, 0.25, 0.5].forEach((weight, i) => near(weights[i], weight));
  assert.ok(Number.isNaN(weights[5]));
  const part = layer.largest(0, [[1, 2], [1, 3]], [1, 1]);
  [0.25, 0.5].forEach((weight, i) => near(part.weights[i], weight));
});

test("a head is summed up", () => {
  const found = layer.summary(0);
  assert.deepEqual([found.mostRead, found.notFinite, found.largest, found.all], [0, 1, 1, 2]);
  near(found.top, 2);
});

test("heads are taken together by index", () => {
  const heads = { a: [{ index: 4, weight: 0.5 }], b: [{ index: 4, weight: 1 }, { index: 2, weight: 0.25 }] };
  const found = meanOverHeads(["a", "b"], (head) => heads[head]);
  assert.deepEqual(found, [{ index: 4, weight: 0.75, most: 1, head: "b" }, { index: 2, weight: 0.125, most: 0.25, head: "b" }]);
});

test("a layer of another length is an error", () => {
  assert.throws(() => new Layer(bytes().slice(0, 40), shape, false), RangeError);
  assert.throws(() => new Layer(bytes(), { ...shape, top: 1 }, false), /bytes, expected 40/);
});

test("base64, numbers and addresses are read", () => {
  assert.deepEqual(bytesOfBase64("AAH/"), Uint8Array.of(0, 1, 255));
  assert.deepEqual([0, 0.1234, 0.00012, NaN].map(textOf), ["0", "0.123", "1.2e-4", "not finite"]);
  const limits = { layer: 4, token: 8, as: ["lines", "map"] };
  const { found, problems } = parseAddress("#layer=3&token=8&as=map&x=1", limits);
  assert.deepEqual(found, { layer: 3, as: "map" });
  assert.deepEqual(problems, ["token=8 (the last is 7)", "x=1"]);
  for (const hash of ["#layer=-1", "#layer=1.5", "#layer=", "#as=pie", "#toString=1", "#%00=%ff"]) {
    assert.deepEqual(parseAddress(hash, limits).found, {}, hash);
  }
});
