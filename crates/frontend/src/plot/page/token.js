// The view of a token: what it reads and what reads it, over all heads.

function buildToken() {
  for (const side of about.isSelf ? ["query"] : ["query", "key"]) {
    const list = byId(`text-${side}`);
    list.hidden = false;
    tokenList(list, side, { choose: (index) => go(chosen(side, index), true), open: () => byId("by-head").focus() });
  }
  const grid = byId("by-head");
  mapEvents(grid, {
    hover: (cell) => describeHead(cell ?? [state.layer, state.head]),
    press: ([layer, head]) => go({ view: "head", layer, head }),
    move: ([down, right]) => {
      const inside = (at, count) => Math.max(0, Math.min(count - 1, at));
      go({ layer: inside(state.layer + down, about.layers.length), head: inside(state.head + right, shape.heads) }, true);
    },
    open: () => go({ view: "head" }),
  });
}

/** The query and the key that the chosen token is: both in self-attention. */
const sidesOfToken = () => (about.isSelf ? { query: state.token ?? state.key, key: state.token ?? state.key }
  : { query: state.token, key: state.token === null ? state.key : null });

/** What `entriesOf(layer, head)` finds in every head. */
const inAllHeads = (entriesOf) => about.layers.flatMap((_, layer) => Array.from({ length: shape.heads }, (_, head) => (
  entriesOf(layerAt(layer), head).map((entry) => ({ layer, head, ...entry })))).flat());

function showToken() {
  const { query, key } = sidesOfToken();
  const [side, index] = query === null ? ["key", key] : ["query", query];
  byId("token-name").textContent = index === null ? "Choose a token"
    : `${about.isSelf ? "Token" : capital(side)} ${named(side, index)}`;
  chooseIn(byId("text-query"), query);
  chooseIn(byId("text-key"), key);
  byId("token-parts").hidden = index === null;
  if (index === null) return;
  const all = about.layers.length * shape.heads;
  const list = (found, name, pair) => weightList(found.slice(0, 12).map(({ index, weight, best }) => ({
    name: named(name, index), weight,
    note: `most in ${headName(best.layer, best.head)}: ${textOf(best.weight)}`,
    press: () => go({ view: "head", layer: best.layer, head: best.head, ...pair(index) }),
  })), found[0]?.weight);
  const parts = [];
  if (query !== null) {
    const reads = overHeads(inAllHeads((layer, head) => layer.reads(head, query).entries), all);
    const known = percent(reads.reduce((sum, { weight }) => sum + weight, 0));
    const text = reads.length ? `Mean weight over ${counted(all, "head")}, of keys among the ${shape.top} largest, which have ` +
      `${known} of the weight.` : "Every key is hidden from it in every head.";
    parts.push(element("div", {}, element("h3", {}, "Reads"), element("p", {}, text), list(reads, "key", (key) => ({ token: query, key }))));
  }
  if (key !== null) {
    const readers = overHeads(inAllHeads((layer, head) => layer.readers(head, key)), all);
    const received = inAllHeads((layer, head) => [{ weight: layer.received[head * shape.keys + key] }]);
    const sum = received.reduce((sum, { weight }) => sum + weight, 0);
    const text = `Mean weight over ${counted(all, "head")}; all queries together give it ${(sum / all).toFixed(2)}.`;
    parts.push(element("div", {}, element("h3", {}, "Is read by"), element("p", {}, text), list(readers, "query", (token) => ({ token, key }))));
  }
  byId("token-lists").replaceChildren(...parts);
  byId("by-head-title").textContent = query === null ? "By head: the mean weight that queries give it"
    : "By head: the weight of the key that it reads most";
  byId("by-head").pixels = null;
  drawMap(byId("by-head"), {
    rows: about.layers.length, columns: shape.heads, most: 1, mark: [state.layer, state.head],
    weights: inAllHeads((layer, head) => [query === null ? { weight: layer.received[head * shape.keys + key] / shape.queries }
      : layer.reads(head, query).entries[0] ?? { weight: 0 }]).map(({ weight }) => weight),
    label: { row: (layer) => about.layers[layer].name || `${layer}`, column: (head) => `head ${head}` },
  });
  describeHead([state.layer, state.head]);
}

/** Says what the chosen token does in a head. */
function describeHead([layer, head]) {
  const { query, key } = sidesOfToken();
  const texts = [];
  if (query !== null) {
    const entries = layerAt(layer).reads(head, query).entries.slice(0, 4);
    texts.push(`reads ${entries.map(({ index, weight }) => `${named("key", index)} ${textOf(weight)}`).join(", ") || "no key"}`);
  }
  if (key !== null) texts.push(`receives ${layerAt(layer).received[head * shape.keys + key].toFixed(3)} in all`);
  byId("by-head-readout").textContent = `${capital(headName(layer, head))}: ${texts.join("; ")}`;
}
