// The view of a token: what it reads and what reads it, over all heads.

const LISTED = 16;

function buildToken() {
  for (const side of about.isSelf ? ["query"] : ["query", "key"]) {
    const list = byId(`text-${side}`);
    list.hidden = false;
    const choose = (index) => go(side === "query" ? { token: index, key: null } : { key: index, token: null }, true);
    tokenList(list, side, { choose, open: () => byId("by-head").focus() });
    list.setAttribute("aria-label", about.isSelf ? "Tokens" : side === "query" ? "Queries" : "Keys");
  }
  const grid = byId("by-head");
  matrixEvents(grid, {
    size: () => [about.layers.length, shape.heads],
    hover: (cell) => describeCell(cell ?? grid.cell),
    move: (step) => {
      const [layer, head] = grid.cell ?? [0, 0];
      const last = [about.layers.length - 1, shape.heads - 1];
      grid.cell = [layer + step[0], head + step[1]].map((at, i) => Math.max(0, Math.min(last[i], at)));
      drawByHead();
    },
    press: (cell) => cell && go({ view: "head", layer: cell[0], head: cell[1] }),
  });
}

/** The query and the key that the chosen token is: both in self-attention. */
function chosenToken() {
  const { token, key } = state;
  if (token !== null) return { query: token, key: about.isSelf ? token : null };
  return { query: about.isSelf ? key : null, key };
}

function showToken() {
  const { query, key } = chosenToken();
  const [side, index] = query === null ? ["key", key] : ["query", query];
  byId("token-name").textContent = index === null ? "Choose a token" : `${capital(about.isSelf ? "token" : side)} ${named(side, index)}`;
  for (const side of ["query", "key"]) {
    const list = byId(`text-${side}`);
    if (list.hidden) continue;
    list.querySelectorAll(".is-read").forEach((token) => token.classList.remove("is-read"));
    const token = chooseIn(list, side === "query" ? query : key);
    if (token) list.scrollTop = token.offsetTop - list.offsetTop - list.clientHeight / 2;
  }
  byId("token-parts").hidden = index === null;
  if (index === null) return;
  const layers = about.layers.map((_, layer) => layerAt(layer));
  const all = layers.length * shape.heads;
  const list = (entries, side, link) => weightList(entries.slice(0, LISTED).map(({ index, weight, best }) => ({
    name: named(side, index),
    weight,
    note: `most in ${headName(best.layer, best.head)}: ${textOf(best.weight < 0 ? NaN : best.weight)}`,
    press: () => go({ view: "head", layer: best.layer, head: best.head, ...link(index) }),
  })));
  const parts = [];
  if (query !== null) {
    const reads = overHeads(layers, shape.heads, (layer, head) => layer.reads(head, query).entries);
    const known = reads.reduce((sum, { weight }) => sum + weight, 0);
    parts.push(element("div", {},
      element("h3", {}, "Reads"),
      element("p", {}, reads.length ? `Mean weight over ${counted(all, "head")}; listed keys are among the ${shape.top} ` +
        `largest of a head, which have ${percent(known)} of the weight.` : "Every key is hidden from it in every head."),
      list(reads, "key", (key) => ({ token: query, key }))));
    for (const { index } of reads.slice(0, LISTED)) byId(`text-${about.isSelf ? "query" : "key"}-${index}`)?.classList.add("is-read");
  }
  if (key !== null) {
    const readBy = overHeads(layers, shape.heads, (layer, head) => layer.readers(head, key));
    let received = 0;
    for (const layer of layers) for (let head = 0; head < shape.heads; head++) received += layer.received[head * shape.keys + key];
    parts.push(element("div", {},
      element("h3", {}, "Is read by"),
      element("p", {}, `It receives ${(received / all).toFixed(2)} in the mean over ${counted(all, "head")}, summed over queries.`),
      list(readBy, "query", (token) => ({ token, key }))));
  }
  byId("token-lists").replaceChildren(...parts);
  const grid = byId("by-head");
  grid.image = null;
  grid.cell ??= [state.layer, state.head];
  const cells = layers.flatMap((layer) => Array.from({ length: shape.heads }, (_, head) => (
    query !== null ? layer.reads(head, query).entries[0]?.weight ?? 0 : layer.received[head * shape.keys + key] / shape.queries)));
  grid.cells = Float32Array.from(cells);
  byId("by-head-title").textContent = query !== null
    ? "By head: the weight of the key that it reads most" : "By head: the mean weight that queries give it";
  drawByHead();
}

function drawByHead() {
  const grid = byId("by-head");
  drawMap(grid, {
    rows: about.layers.length, columns: shape.heads, weights: grid.cells, most: 1, mark: grid.cell,
    label: { row: (layer) => about.layers[layer].name || `${layer}`, column: (head) => `head ${head}` },
  });
  describeCell(grid.cell);
}

function describeCell([layer, head]) {
  const { query, key } = chosenToken();
  const texts = [];
  if (query !== null) texts.push(readsText(layer, head, query));
  if (key !== null) texts.push(`as a key it receives ${layerAt(layer).received[head * shape.keys + key].toFixed(3)}`);
  byId("by-head-readout").textContent = `${headName(layer, head)}: ${texts.join("; ")}`;
}

/** The keys that a query reads in a head, in a line. */
function readsText(layer, head, query) {
  const { entries, rest } = layerAt(layer).reads(head, query);
  if (!entries.length) return "every key is hidden from it";
  const listed = entries.slice(0, 4).map(({ index, weight }) => `${named("key", index)} ${textOf(weight)}`);
  const more = entries.slice(4).reduce((sum, { weight }) => sum + weight, rest);
  return `reads ${listed.join(", ")}${more > 0 ? `, others ${textOf(more)}` : ""}`;
}
