// The view of a token: what it reads and what reads it, over all heads.

function buildToken() {
  for (const side of about.isSelf ? ["query"] : ["query", "key"]) {
    byId(`text-${side}`).hidden = false;
    const choose = (index) => go(chosen(side, index), true);
    tokenList(`text-${side}`, side, { choose, open: () => byId("by-head").focus() });
  }
  mapEvents("by-head", {
    hover: (cell) => describeHead(cell ?? [state.layer, state.head]),
    press: ([layer, head]) => go({ view: "head", layer, head }),
    move: ([down, right]) => go({
      layer: inside(state.layer + down, about.layers.length), head: inside(state.head + right, shape.heads),
    }, true),
    open: () => go({ view: "head" }),
  });
}

const allHeads = () => about.layers.flatMap((_, layer) => range(shape.heads, (head) => [layer, head]));

/** The sum over queries of the weight that a key has in a head. */
const receivedBy = (layer, head, key) => layerAt(layer).received[head * shape.keys + key];

/** Elements that say what a token reads and what reads it, in the mean over heads `[layer, head]`. */
function tokenParts({ query, key }, heads) {
  const mean = heads.length > 1 ? `, mean over ${counted(heads.length, "head")}` : "";
  const sum = (numberOf) => heads.reduce((sum, [layer, head]) => sum + numberOf(layer, head) / heads.length, 0);
  const part = (title, text, visit, side, pair) => {
    const found = overHeads(heads, countOf(side), ([layer, head], each) => visit(layerAt(layer), head, each));
    const rows = found.slice(0, 12).map(({ index, weight, most, head: [layer, head] }) => ({
      name: named(side, index), weight,
      note: mean && `most in ${headName(layer, head)}: ${textOf(most)}`,
      press: () => go({ view: "head", layer, head, ...pair(index) }, !mean),
    }));
    const list = found.length ? weightList(rows, mean ? found[0].weight : 1) : element("p", {}, `No ${side}.`);
    return element("div", {}, element("h3", {}, title), element("p", {}, text + mean), list);
  };
  const parts = [];
  if (query !== null) {
    const entropy = sum((layer, head) => layerAt(layer).entropy[head * shape.queries + query]);
    const rest = sum((layer, head) => layerAt(layer).reads(head, query).rest);
    const others = shape.top < shape.keys ? `; other keys than the ${shape.top} largest, or a sink: ${percent(rest)}` : "";
    const text = `entropy ${entropy.toFixed(2)} nats${others}`;
    const visit = (layer, head, each) =>
      layer.reads(head, query).entries.forEach(({ index, weight }) => each(index, weight));
    parts.push(part(`${named("query", query)} reads`, text, visit, "key", (key) => ({ token: query, key })));
  }
  if (key !== null) {
    const text = `receives ${sum((layer, head) => receivedBy(layer, head, key)).toFixed(2)} from all queries together`;
    const visit = (layer, head, each) => layer.forEachReader(head, key, each);
    parts.push(part(`${named("key", key)} is read by`, text, visit, "query", (token) => ({ token, key })));
  }
  return parts;
}

function showToken() {
  const shown = shownToken();
  const { query, key } = shown ? sidesOf(shown) : { query: null, key: null };
  byId("token-name").textContent = shown
    ? `${about.isSelf ? "Token" : capital(shown.side)} ${named(shown.side, shown.index)}` : "Choose a token";
  chooseIn(byId("text-query"), query);
  chooseIn(byId("text-key"), key);
  byId("token-parts").hidden = !shown;
  if (!shown) return;
  byId("token-lists").replaceChildren(...tokenParts({ query, key }, allHeads()));
  byId("by-head-title").textContent = query === null ? "By head: the mean weight that queries give it"
    : "By head: the weight of the key that it reads most";
  drawMap(byId("by-head"), {
    rows: about.layers.length, columns: shape.heads, most: 1, mark: [state.layer, state.head],
    weights: allHeads().map(([layer, head]) => (query === null ? receivedBy(layer, head, key) / shape.queries
      : layerAt(layer).reads(head, query).entries[0]?.weight ?? 0)),
    label: { row: (layer) => about.layers[layer].name || `${layer}`, column: (head) => `head ${head}` },
  });
  describeHead([state.layer, state.head]);
}

/** Says what the chosen token does in a head. */
function describeHead([layer, head]) {
  const shown = shownToken();
  // A pointer that leaves may come after the view was left.
  if (!shown) return;
  const { query, key } = sidesOf(shown);
  const best = query === null ? null : layerAt(layer).reads(head, query).entries[0];
  const reads = best ? `reads ${named("key", best.index)} most, ${textOf(best.weight)}` : "reads no key";
  const text = query === null ? `receives ${receivedBy(layer, head, key).toFixed(3)} in all` : reads;
  byId("by-head-readout").textContent = `${capital(headName(layer, head))}: ${text}`;
}
