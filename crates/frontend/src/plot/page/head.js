// The view of a head: tokens with lines between them, or the map, of all tokens or of the patches of a picture.

const ROW = 24; // the height of a token beside the lines, as in page.css
const photo = new Image();
let hovered = null; // the token under the pointer, `{ side, index }`
let zoomed = 1;
let mapped = null; // what is on the map: see `drawMap`; `pairAt(cell)`, `press(pair)` and `move(step)` give what is chosen
const shownFrom = { query: 0, key: 0 }; // where a zoomed map begins

/** What is chosen with a token alone: a query wherever it is one. */
const chosen = (side, index) =>
  side === "query" || about.isSelf ? { token: index, key: null } : { token: null, key: index };

/** The query and the key that a token is: both in self-attention. */
const sidesOf = ({ side, index }) =>
  about.isSelf ? { query: index, key: index } : { query: null, key: null, [side]: index };

function buildHead() {
  const option = (value, text) => element("option", { value }, text);
  byId("layer").append(...about.layers.map(({ name }, layer) => option(layer, `${layer} ${name}`)));
  byId("number").append(...range(shape.heads, (head) => option(head, head)));
  on("layer", "change", (event) => go({ layer: Number(event.target.value) }));
  on("number", "change", (event) => go({ head: Number(event.target.value) }));
  on("previous", "click", () => moveHead(-1));
  on("next", "click", () => moveHead(1));
  on("zoom-in", "click", () => zoom(2));
  on("zoom-out", "click", () => zoom(0.5));
  on("lines", "scroll", drawLines);
  for (const as of AS) on(`as-${as}`, "click", () => go({ as }));
  const open = () => go({ view: "token" });
  for (const side of ["query", "key"]) {
    const choose = (index) => go(side === "query" ? { token: index, key: null } : { token: null, key: index }, true);
    const hover = (index) => {
      hovered = index < 0 ? null : { side, index };
      drawLines();
      showDetails();
    };
    tokenList(`list-${side}`, side, { choose, open, hover });
  }
  mapEvents("map", {
    hover: (cell) => readPair(cell ? mapped.pairAt(cell) : state),
    press: (cell) => go(mapped.press(mapped.pairAt(cell)), true),
    move: (step) => go(mapped.move(step), true),
    open,
  });
  if (!about.picture) return;
  byId("as-picture").hidden = false;
  photo.src = `data:image/${about.picture.kind};base64,${byId("picture-data").textContent}`;
  photo.onload = show;
  const whose = (name, token) => element("button", { onclick: () => go({ token, key: null }, true) }, name);
  const first = range(about.isSelf ? about.picture.leading : shape.queries, (token) => whose(named("query", token), token));
  byId("leading").append(whose("All queries", null), ...first);
}

/** Another head, in the order of layers. */
function moveHead(step) {
  const at = inside(state.layer * shape.heads + state.head + step, about.layers.length * shape.heads);
  go({ layer: Math.floor(at / shape.heads), head: at % shape.heads });
}

function showHead() {
  const { layer, head, token, key } = state;
  [byId("layer").value, byId("number").value] = [layer, head];
  byId("head-summary").textContent = `${capital(headName(layer, head))}: ${headText(layer, head)}.`;
  for (const as of AS) byId(`as-${as}`).setAttribute("aria-pressed", as === state.as);
  const hidden = { "lines-part": "map picture", "map-part": "lines", leading: "lines map", zoom: "lines picture" };
  for (const [id, as] of Object.entries(hidden)) byId(id).hidden = as.split(" ").includes(state.as);
  if (state.as === "lines") {
    chooseIn(byId("list-key"), token === null ? key : null);
    chooseIn(byId("list-query"), token);
    drawLines();
  } else {
    showMap();
  }
  showDetails();
}

/** The token that is shown: the one under the pointer, or the chosen one. */
function shownToken() {
  if (hovered) return hovered;
  if (state.token !== null) return { side: "query", index: state.token };
  return state.key === null ? null : { side: "key", index: state.key };
}

/** The lines of a token, `[query, key, weight]`. */
function linesOf({ side, index: token }) {
  const [layer, { head }] = [layerAt(state.layer), state];
  if (side === "key") return layer.readers(head, token).map(({ index, weight }) => [index, token, weight]);
  return layer.reads(head, token).entries.map(({ index, weight }) => [token, index, weight]);
}

function drawLines() {
  if (state.view !== "head" || state.as !== "lines") return;
  const [width, top] = [byId("between").clientWidth, byId("lines").scrollTop];
  const height = Math.min(byId("lines").clientHeight, Math.max(shape.queries, shape.keys) * ROW);
  const context = fitted(byId("links"), width, height);
  const [shown, first] = [shownToken(), Math.floor(top / ROW)];
  const inSight = range(Math.max(0, Math.min(shape.queries - first, height / ROW + 2)), (i) => ({ side: "query", index: first + i }));
  const lines = (shown ? [shown] : inSight).flatMap(linesOf);
  const y = (index) => (index + 0.5) * ROW - top;
  const accent = colour("--accent");
  for (const [query, key, weight] of lines.reverse()) {
    const share = Number.isFinite(weight) ? weight : 0;
    context.strokeStyle = Number.isFinite(weight) ? accent : `rgb(${NOT_FINITE})`;
    context.globalAlpha = Math.max(0.08, Math.sqrt(share));
    context.lineWidth = 1 + 3 * share;
    context.beginPath();
    context.moveTo(0, y(query));
    context.bezierCurveTo(width / 2, y(query), width / 2, y(key), width, y(key));
    context.stroke();
  }
  byId("lines").querySelectorAll(".is-linked").forEach((token) => token.classList.remove("is-linked"));
  if (!shown) return;
  const isQuery = shown.side === "query";
  Object.assign(context, { globalAlpha: 1, textAlign: isQuery ? "right" : "left" });
  for (const [query, key, weight] of lines) {
    byId(isQuery ? `list-key-${key}` : `list-query-${query}`).classList.add("is-linked");
    const [x, at, size] = [isQuery ? width - 4 : 4, y(isQuery ? key : query), context.measureText(textOf(weight)).width];
    context.fillStyle = colour("--ground");
    context.fillRect(isQuery ? x - size - 2 : x - 2, at - 8, size + 4, 16);
    context.fillStyle = colour("--text");
    context.fillText(textOf(weight), x, at);
  }
}

function showMap() {
  mapped = state.as === "map" ? mapOfTokens() : mapOfPatches();
  drawMap(byId("map"), mapped);
  const context = fitted(byId("scale"), 236, 34);
  context.drawImage(pixelsOf({ weights: range(200, (x) => (x / 199) ** 2), rows: 1, columns: 200, most: 1 }), 10, 0, 200, 14);
  Object.assign(context, { fillStyle: colour("--soft"), textAlign: "center" });
  for (const at of [0, 0.5, 1]) context.fillText(at ? (at ** 2 * mapped.most).toPrecision(2) : "0", 10 + 200 * at, 25);
  byId("map-note").textContent = mapped.note;
  readPair(state);
}

/** The first and the end of what the map shows of a side, so that what is chosen is in sight. */
function rangeOf(side, at) {
  const size = Math.min(countOf(side), Math.max(8, Math.ceil(countOf(side) / zoomed)));
  if (at !== null && (at < shownFrom[side] || at >= shownFrom[side] + size)) shownFrom[side] = at - (size >> 1);
  shownFrom[side] = inside(shownFrom[side], countOf(side) - size + 1);
  return [shownFrom[side], shownFrom[side] + size];
}

/** Zooms around the chosen weight, or the middle. */
function zoom(factor) {
  if (state.view !== "head" || state.as !== "map") return;
  zoomed = Math.max(1, Math.min(zoomed * factor, Math.max(shape.queries, shape.keys) / 8));
  for (const [side, at] of [["query", state.token], ["key", state.key]]) {
    const [start, end] = mapped[side];
    shownFrom[side] = Math.round((at ?? (start + end) / 2) - countOf(side) / zoomed / 2);
  }
  show();
}

function mapOfTokens() {
  const [layer, { head, token, key: chosenKey }] = [layerAt(state.layer), state];
  const [query, key] = [rangeOf("query", token), rangeOf("key", chosenKey)];
  const per = { query: Math.ceil((query[1] - query[0]) / 720), key: Math.ceil((key[1] - key[0]) / 720) };
  const isChosen = token !== null && chosenKey !== null;
  return {
    ...layer.largest(head, { query, key }, per), query, key,
    most: summaryOf(state.layer, head).largest || 1,
    mark: isChosen ? [(token - query[0]) / per.query, (chosenKey - key[0]) / per.key].map(Math.floor) : null,
    label: { row: (i) => tokenText("query", query[0] + i * per.query), column: (i) => tokenText("key", key[0] + i * per.key) },
    note: `Queries ${query[0]} to ${query[1] - 1} go down, keys ${key[0]} to ${key[1] - 1} across. ` +
      (layer.isComplete ? "All weights are drawn." : `The ${shape.top} largest weights of each query are drawn.`) +
      (per.query + per.key > 2 ? " A cell has the largest weight of several tokens: zoom in to tell them apart." : ""),
    pairAt([row, column]) {
      const [q, k] = [query[0] + row * per.query, key[0] + column * per.key];
      let best = { token: q, key: k, weight: 0 };
      const within = { query: [q, Math.min(query[1], q + per.query)], key: [k, Math.min(key[1], k + per.key)] };
      layer.forEach(head, within, (token, key, weight) => weight > best.weight && (best = { token, key, weight }));
      return { token: best.token, key: best.key };
    },
    press: (pair) => pair,
    move: ([down, right]) => ({
      token: inside((token ?? 0) + (isChosen ? down : 0), shape.queries),
      key: inside((chosenKey ?? 0) + (isChosen ? right : 0), shape.keys),
    }),
  };
}

function mapOfPatches() {
  const { rows, columns, leading } = about.picture;
  const patch = about.isSelf ? state.token : state.key;
  const found = range(rows * columns, (i) => weightOf(state.token, leading + i));
  const weights = found.map(({ weight, isBound }) => (isBound ? 0 : weight));
  const known = layerAt(state.layer).isComplete ? "" : `: the ${shape.top} largest weights are drawn`;
  return {
    rows, columns, weights, photo,
    most: Math.max(...weights.filter(Number.isFinite), 0) || 1,
    mark: patch !== null && patch >= leading ? [Math.floor((patch - leading) / columns), (patch - leading) % columns] : null,
    note: state.token === null ? "The weight that each patch receives, in the mean over queries."
      : `What query ${named("query", state.token)} reads${known}.`,
    pairAt: ([row, column]) => ({ token: state.token, key: leading + row * columns + column }),
    press: ({ key }) => chosen("key", key),
    move: ([down, right]) => chosen("key", leading + inside((patch ?? leading) - leading + down * columns + right, rows * columns)),
  };
}

/** The weight of a pair, as `Layer.weightAt` gives it; without a query, what a key receives in the mean. */
function weightOf(query, key) {
  if (query !== null) return layerAt(state.layer).weightAt(state.head, query, key);
  return { weight: receivedBy(state.layer, state.head, key) / shape.queries, isBound: false };
}

/** Says which weight is under the pointer, or chosen. */
function readPair({ token, key }) {
  const { weight, isBound } = key === null ? {} : weightOf(token, key);
  const query = token === null ? "all queries" : `query ${named("query", token)}`;
  byId("map-readout").textContent = key === null ? "Point at a cell, or move with the arrow keys."
    : `${query} → key ${named("key", key)}: ${isBound ? "at most " : ""}${textOf(weight)}`;
}

/** What the token shown reads in this head, and what reads it. */
function showDetails() {
  const shown = shownToken();
  const link = element("button", { onclick: () => go({ view: "token" }) }, "This token in all heads");
  const hint = element("p", {}, "Choose a token to see what it reads and what reads it.");
  byId("details").replaceChildren(...(shown ? [...tokenParts(sidesOf(shown), [[state.layer, state.head]]), link] : [hint]));
}
