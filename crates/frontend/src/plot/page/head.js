// The view of a head: tokens with lines between them, or the map, of all tokens or of the patches of a picture.

const ROW_HEIGHT = 24; // of a token next to the lines, as in page.css
let hovered = null; // the token under the pointer, `{ side, index }`

function buildHead() {
  const zoom = (factor) => go({ zoom: Math.max(1, Math.min(state.zoom * factor, Math.max(shape.queries, shape.keys) / 8)) });
  const clicks = { previous: () => moveHead(-1), next: () => moveHead(1), "zoom-in": () => zoom(2), "zoom-out": () => zoom(0.5) };
  for (const [id, onclick] of Object.entries(clicks)) byId(id).onclick = onclick;
  byId("layer").append(...about.layers.map(({ name }, layer) => new Option(`${layer} ${name}`, layer)));
  byId("number").append(...range(shape.heads, (head) => new Option(head, head)));
  byId("layer").onchange = ({ target }) => go({ layer: Number(target.value) });
  byId("number").onchange = ({ target }) => go({ head: Number(target.value) });
  const hover = (token) => {
    hovered = token;
    drawLines();
    showDetails();
  };
  const lines = byId("lines");
  lines.onscroll = drawLines;
  lines.onpointerover = ({ target, pointerType }) => pointerType === "mouse" && hover(target.closest(".token")?.token ?? null);
  lines.onpointerleave = () => hover(null);
  if (!about.picture) return;
  byId("as-picture").hidden = false;
  byId("map").style.setProperty("--photo", `url(data:image/${about.picture.kind};base64,${byId("picture-data").textContent})`);
  const queries = range(about.isSelf ? about.picture.leading : shape.queries, (index) => [tokenName("query", index), index]);
  byId("leading").append(...[["All queries", null], ...queries].map(([name, index]) =>
    element("button", { onclick: () => go(only({ side: "query", index })) }, name)));
}

/** Opens another head, in the order of layers. */
function moveHead(step) {
  const index = clamp(state.layer * shape.heads + state.head + step, about.layers.length * shape.heads);
  go({ layer: Math.floor(index / shape.heads), head: index % shape.heads });
}

function showHead() {
  const { layer, head, query, key, as } = state;
  [byId("layer").value, byId("number").value] = [layer, head];
  setText("head-summary", `${capital(headName(layer, head))}: ${headText(layer, head)}.`);
  for (const form of FORMS) byId(`as-${form}`).setAttribute("aria-pressed", form === as);
  byId("head").dataset.as = as;
  if (as === "lines") {
    showTokens("list-query", "query", query);
    showTokens("list-key", "key", query === null ? key : null);
    drawLines();
  } else {
    const map = as === "map" ? mapOfTokens() : mapOfPatches();
    showMap("map", map);
    setText("map-note", map.note);
    pixelsOf({ weights: range(200, (x) => (x / 199) ** 2), rows: 1, columns: 200, most: 1 }, byId("scale"));
    setText("scale-middle", (map.most / 4).toPrecision(2));
    setText("scale-most", map.most.toPrecision(2));
  }
  showDetails();
}

/** Draws the lines of the selected token, with their weights at the other ends, or those of all visible tokens. */
function drawLines() {
  const [width, top] = [byId("between").clientWidth, byId("lines").scrollTop];
  const height = Math.min(byId("lines").clientHeight, Math.max(shape.queries, shape.keys) * ROW_HEIGHT);
  const [shown, first] = [shownToken(), Math.floor(top / ROW_HEIGHT)];
  const inSight = range(Math.max(0, Math.min(shape.queries - first, height / ROW_HEIGHT + 2)), (i) => first + i);
  const [partner, from, to] = shown.side === "key" ? ["query", width, 0] : ["key", 0, width];
  const y = (index) => (index + 0.5) * ROW_HEIGHT - top;
  for (const token of byId("lines").querySelectorAll(".is-linked")) token.classList.remove("is-linked");
  const isShown = shown.index !== null;
  const [curves, texts] = [{}, []]; // curves of one style are one path: there may be thousands
  for (const token of isShown ? [shown.index] : inSight) {
    for (const { index, weight } of sortByWeight(layerAt(state.layer).partners(shown.side, state.head, token)).reverse()) {
      const [share, colour] = Number.isFinite(weight) ? [weight, "var(--accent)"] : [0, "#969696"];
      const opacity = Math.max(0.08, Math.sqrt(share)).toFixed(2);
      const look = `stroke="${colour}" stroke-width="${(1 + 3 * share).toFixed(1)}" opacity="${opacity}"`;
      (curves[look] ??= []).push(`M${from} ${y(token)}C${width / 2} ${y(token)} ${width / 2} ${y(index)} ${to} ${y(index)}`);
      if (!isShown) continue;
      byId(`list-${partner}-${index}`).classList.add("is-linked");
      if (y(index) > 0 && y(index) < height) texts.push(`<text x="${to}" y="${y(index) + 4}">${textOf(weight)}</text>`);
    }
  }
  byId("links").style = `height: ${height}px; text-anchor: ${to ? "end" : "start"}`;
  const paths = Object.entries(curves).map(([look, found]) => `<path ${look} d="${found.join("")}"/>`);
  byId("links").innerHTML = [...paths, ...texts].join(""); // contains numbers only
}

/** The first and the end of the part of a side that the map shows, around the selection. */
function rangeInSight(side) {
  const count = tokens[side].length;
  const size = Math.min(count, Math.max(8, Math.ceil(count / state.zoom)));
  const first = clamp(Math.round((state[side] ?? count / 2) - size / 2), count - size + 1);
  return [first, first + size];
}

function mapOfTokens() {
  const [layer, ranges, counts] = [layerAt(state.layer), SIDES.map(rangeInSight), [shape.queries, shape.keys]];
  const chosen = [state.query, state.key];
  const perCell = ranges.map(([first, end]) => Math.ceil((end - first) / 720));
  const start = ranges.map(([first], i) => Math.floor(((chosen[i] ?? 0) - first) / perCell[i]));
  const labelsOf = ([first, end], i) => tokens[SIDES[i]].slice(first, end).filter((_, index) => index % perCell[i] === 0);
  /** The pair with the largest weight in a cell. */
  const pairAt = (cell) => {
    const firsts = ranges.map(([first], i) => clamp(first + cell[i] * perCell[i], counts[i]));
    const window = firsts.map((first, i) => [first, Math.min(first + perCell[i], counts[i])]);
    let best = { pair: { query: firsts[0], key: firsts[1] }, weight: 0 };
    layer.forEach(state.head, window, (query, key, weight) => weight > best.weight && (best = { pair: { query, key }, weight }));
    return best.pair;
  };
  const [queries, keys] = ranges.map(([first, end]) => `${first} to ${end - 1}`);
  return {
    ...layer.largest(state.head, ranges, perCell), labels: ranges.map(labelsOf), start,
    most: summaryOf(state.layer, state.head).largest || 1,
    marked: chosen.includes(null) ? null : start,
    note: `Queries ${queries} go down, keys ${keys} across. ` +
      (layer.isComplete ? "All weights are drawn." : `The ${shape.top} largest weights of each query are drawn.`) +
      (Math.max(...perCell) > 1 ? " A cell has the largest weight of several tokens: zoom in to tell them apart." : ""),
    describe: (cell) => describePair(cell ? pairAt(cell) : state),
    choose: (cell) => go(pairAt(cell)),
  };
}

function mapOfPatches() {
  const { rows, columns, leading } = about.picture;
  const side = about.isSelf ? "query" : "key"; // the side on which a patch is selected
  const patch = state[side] === null ? -1 : state[side] - leading;
  const keyAt = ([row, column]) => leading + clamp(row, rows) * columns + clamp(column, columns);
  const layer = layerAt(state.layer);
  const found = range(rows * columns, (i) => layer.weightAt(state.head, state.query, leading + i));
  const weights = found.map(({ weight, isBound }) => (isBound ? 0 : weight));
  const known = layer.isComplete ? "" : `: the ${shape.top} largest weights are drawn`;
  return {
    rows, columns, weights, isPicture: true,
    most: Math.max(...weights.filter(Number.isFinite), 0) || 1,
    marked: patch >= 0 ? [Math.floor(patch / columns), patch % columns] : null,
    note: state.query === null ? "The weight that each patch receives, in the mean over queries."
      : `What query ${tokenName("query", state.query)} reads${known}.`,
    describe: (cell) => describePair(cell ? { query: state.query, key: keyAt(cell) } : state),
    choose: (cell) => go(only({ side, index: keyAt(cell) })),
  };
}

/** Shows the weight under the pointer, or the selected one. */
function describePair({ query, key }) {
  const { weight, isBound } = key === null ? {} : layerAt(state.layer).weightAt(state.head, query, key);
  const reader = query === null ? "all queries" : `query ${tokenName("query", query)}`;
  setText("map-readout", key === null ? "Point at a cell, or move with the arrow keys."
    : `${reader} → key ${tokenName("key", key)}: ${isBound ? "at most " : ""}${textOf(weight)}`);
}

/** Lists the keys that the token attends to in this head, and the queries that attend to it. */
const showDetails = () => showWeights("details-lists", sidesOf(shownToken()), [[state.layer, state.head]]);
