// The view of a head: tokens with lines between them, or the map, of all tokens or of the patches of a picture.

const ROW = 24; // the height of a token beside the lines, as in page.css
const photo = new Image();
let hovered = null; // the token under the pointer, `{ side, index }`
let zoomed = 1;
const shownFrom = { query: 0, key: 0 }; // where a zoomed map begins

/** What is chosen with a token alone: a query wherever it is one. */
function chosen(side, index) {
  return side === "query" || about.isSelf ? { token: index, key: null } : { token: null, key: index };
}

/** The query and the key that a token is: both in self-attention. */
const sidesOf = ({ side, index }) => ({
  query: side === "query" || about.isSelf ? index : null,
  key: side === "key" || about.isSelf ? index : null,
});

function buildHead() {
  const option = (name, value) => element("option", { value }, name ? `${value}: ${name}` : value);
  byId("layer").append(...about.layers.map(({ name }, layer) => option(name, layer)));
  byId("number").append(...Array.from({ length: shape.heads }, (_, head) => option("", head)));
  byId("layer").addEventListener("change", (event) => go({ layer: Number(event.target.value) }));
  byId("number").addEventListener("change", (event) => go({ head: Number(event.target.value) }));
  byId("previous").addEventListener("click", () => moveHead(-1));
  byId("next").addEventListener("click", () => moveHead(1));
  byId("zoom-in").addEventListener("click", () => zoom(2));
  byId("zoom-out").addEventListener("click", () => zoom(0.5));
  for (const as of AS) byId(`as-${as}`).addEventListener("click", () => go({ as }));
  for (const side of ["query", "key"]) {
    tokenList(byId(`list-${side}`), side, {
      choose: (index) => go(side === "query" ? { token: index, key: null } : { token: null, key: index }, true),
      open: () => go({ view: "token" }),
      hover: (index) => {
        hovered = index < 0 ? null : { side, index };
        drawLines();
        showDetails();
      },
    });
  }
  byId("lines").addEventListener("scroll", drawLines);
  mapEvents(byId("map"), {
    hover: (cell) => readPair(cell ? mapped.pairAt(cell) : state),
    press: (cell) => go(mapped.press(mapped.pairAt(cell)), true),
    move: (step) => go(mapped.move(step), true),
    open: () => go({ view: "token" }),
  });
  if (!about.picture) return;
  byId("as-picture").hidden = false;
  photo.src = `data:image/${about.picture.kind};base64,${byId("picture-data").textContent}`;
  photo.onload = show;
  const whose = (name, token) => element("button", { onclick: () => go({ token, key: null }, true) }, name);
  const firstTokens = Array.from({ length: about.isSelf ? about.picture.leading : shape.queries }, (_, token) => token);
  byId("leading").append(whose("All queries", null), ...firstTokens.map((token) => whose(named("query", token), token)));
}

/** Another head, in the order of layers. */
function moveHead(step) {
  const at = state.layer * shape.heads + state.head + step;
  if (at < 0 || at >= about.layers.length * shape.heads) return;
  go({ layer: Math.floor(at / shape.heads), head: at % shape.heads });
}

function showHead() {
  [byId("layer").value, byId("number").value] = [state.layer, state.head];
  byId("head-summary").textContent = `${capital(headName(state.layer, state.head))}: ${headText(state.layer, state.head)}.`;
  for (const as of AS) byId(`as-${as}`).setAttribute("aria-pressed", as === state.as);
  byId("lines-part").hidden = state.as !== "lines";
  byId("map-part").hidden = state.as === "lines";
  byId("leading").hidden = state.as !== "picture";
  byId("zoom").hidden = state.as !== "map";
  if (state.as === "lines") {
    chooseIn(byId("list-key"), state.token === null ? state.key : null);
    chooseIn(byId("list-query"), state.token);
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

function drawLines() {
  if (state.view !== "head" || state.as !== "lines") return;
  const [layer, head, shown] = [layerAt(state.layer), state.head, shownToken()];
  const [width, top] = [byId("between").clientWidth, byId("lines").scrollTop];
  const height = Math.min(byId("lines").clientHeight, Math.max(shape.queries, shape.keys) * ROW);
  const context = fitted(byId("links"), width, height);
  let links;
  if (shown?.side === "key") {
    links = layer.readers(head, shown.index).map(({ index, weight }) => [index, shown.index, weight]);
  } else {
    const first = Math.floor(top / ROW);
    const count = Math.min(shape.queries - first, Math.ceil(height / ROW) + 1);
    const queries = shown ? [shown.index] : Array.from({ length: count }, (_, i) => first + i);
    links = queries.flatMap((query) => layer.reads(head, query).entries.map(({ index, weight }) => [query, index, weight]));
  }
  byId("lines").querySelectorAll(".is-linked").forEach((token) => token.classList.remove("is-linked"));
  const y = (index) => (index + 0.5) * ROW - top;
  for (const [query, key, weight] of links.reverse()) {
    const share = Number.isFinite(weight) ? weight : 0;
    context.strokeStyle = Number.isFinite(weight) ? colour("--accent") : `rgb(${NOT_FINITE})`;
    context.globalAlpha = Math.max(0.08, Math.sqrt(share));
    context.lineWidth = 1 + 3 * share;
    context.beginPath();
    context.moveTo(0, y(query));
    context.bezierCurveTo(width / 2, y(query), width / 2, y(key), width, y(key));
    context.stroke();
  }
  context.globalAlpha = 1;
  if (!shown) return;
  const isQuery = shown.side === "query";
  context.textAlign = isQuery ? "right" : "left";
  for (const [query, key, weight] of links) {
    byId(isQuery ? `list-key-${key}` : `list-query-${query}`).classList.add("is-linked");
    const [x, at, size] = [isQuery ? width - 4 : 4, y(isQuery ? key : query), context.measureText(textOf(weight)).width];
    context.fillStyle = colour("--ground");
    context.fillRect(isQuery ? x - size - 2 : x - 2, at - 8, size + 4, 16);
    context.fillStyle = colour("--text");
    context.fillText(textOf(weight), x, at);
  }
}

/** What is on the map now: see `drawMap`; `pairAt(cell)`, `press(pair)` and `move(step)` give what is chosen. */
let mapped = null;

function showMap() {
  const map = byId("map");
  mapped = state.as === "map" ? mapOfTokens() : mapOfPatches();
  map.pixels = null;
  drawMap(map, mapped);
  const context = fitted(byId("scale"), 236, 34);
  for (let x = 0; x < 200; x++) {
    context.fillStyle = `rgb(${colourOf((x / 199) ** 2 * mapped.most, mapped.most)})`;
    context.fillRect(10 + x, 0, 1, 14);
  }
  Object.assign(context, { fillStyle: colour("--soft"), textAlign: "center" });
  for (const at of [0, 0.5, 1]) context.fillText(at ? (at ** 2 * mapped.most).toPrecision(2) : "0", 10 + 200 * at, 25);
  byId("map-note").textContent = mapped.note;
  readPair(state);
}

/** The first and the end of what a zoomed map shows of a side, so that what is chosen is in sight. */
function rangeOf(side, count, at) {
  const size = Math.min(count, Math.max(8, Math.ceil(count / zoomed)));
  if (at !== null && (at < shownFrom[side] || at >= shownFrom[side] + size)) shownFrom[side] = at - (size >> 1);
  shownFrom[side] = Math.max(0, Math.min(count - size, shownFrom[side]));
  return [shownFrom[side], shownFrom[side] + size];
}

/** Zooms around the chosen weight, or the middle. */
function zoom(factor) {
  if (state.view !== "head" || state.as !== "map") return;
  const middles = [mapped.query, mapped.key].map(([start, end]) => (start + end) / 2);
  zoomed = Math.max(1, Math.min(zoomed * factor, Math.max(shape.queries, shape.keys) / 8));
  for (const [side, at, middle] of [["query", state.token, middles[0]], ["key", state.key, middles[1]]]) {
    const count = shape[side === "query" ? "queries" : "keys"];
    shownFrom[side] = Math.round((at ?? middle) - count / zoomed / 2);
  }
  show();
}

function mapOfTokens() {
  const [layer, { head, token, key: chosenKey }] = [layerAt(state.layer), state];
  const [query, key] = [rangeOf("query", shape.queries, token), rangeOf("key", shape.keys, chosenKey)];
  const [rows, columns] = [Math.min(720, query[1] - query[0]), Math.min(720, key[1] - key[0])];
  const cell = (at, [start, end], count) => Math.floor(((at - start) * count) / (end - start));
  const from = (i, [start, end], count) => start + Math.ceil((i * (end - start)) / count);
  const drawn = layer.tile ? "All weights are drawn." : `The ${shape.top} largest weights of each query are drawn.`;
  const isCoarse = rows < query[1] - query[0] || columns < key[1] - key[0];
  return {
    query, key, rows, columns,
    weights: layer.largest(head, { query, key }, rows, columns),
    most: summaryOf(state.layer, head).largest || 1,
    mark: token === null || chosenKey === null ? null : [cell(token, query, rows), cell(chosenKey, key, columns)],
    label: { row: (i) => tokenText("query", from(i, query, rows)), column: (i) => tokenText("key", from(i, key, columns)) },
    note: `Queries ${query[0]} to ${query[1] - 1} go down, keys ${key[0]} to ${key[1] - 1} across. ${drawn}` +
      (isCoarse ? " A cell has the largest weight of several tokens: zoom in to tell them apart." : ""),
    pairAt([row, column]) {
      const within = { query: [0, 1].map((i) => from(row + i, query, rows)), key: [0, 1].map((i) => from(column + i, key, columns)) };
      let best = { token: within.query[0], key: within.key[0], weight: 0 };
      layer.forEach(head, within, (q, k, weight) => weight > best.weight && (best = { token: q, key: k, weight }));
      return { token: best.token, key: best.key };
    },
    press: (pair) => pair,
    move: ([down, right]) => ({
      token: Math.max(0, Math.min(shape.queries - 1, (token ?? 0) + (chosenKey === null ? 0 : down))),
      key: Math.max(0, Math.min(shape.keys - 1, chosenKey === null ? 0 : chosenKey + right)),
    }),
  };
}

function mapOfPatches() {
  const { rows, columns, leading } = about.picture;
  const patch = about.isSelf ? state.token : state.key;
  const weights = Array.from({ length: rows * columns }, (_, i) => {
    const { weight, isBound } = weightOf(state.token, leading + i);
    return isBound ? 0 : weight;
  });
  const most = Math.max(...weights.filter(Number.isFinite), 0) || 1;
  return {
    rows, columns, weights, most, photo,
    mark: patch >= leading ? [Math.floor((patch - leading) / columns), (patch - leading) % columns] : null,
    note: state.token === null ? "The weight that each patch receives, in the mean over queries."
      : `What query ${named("query", state.token)} reads` +
        (layerAt(state.layer).tile ? "." : `: the ${shape.top} largest weights are drawn.`),
    pairAt: ([row, column]) => ({ token: state.token, key: leading + row * columns + column }),
    press: ({ key }) => chosen("key", key),
    move: ([down, right]) => {
      const to = Math.max(leading, patch ?? 0) + down * columns + right;
      return to >= leading && to < shape.keys ? chosen("key", to) : {};
    },
  };
}

/** The weight of a pair, as `Layer.weightAt` gives it; without a query, what a key receives in the mean. */
function weightOf(query, key) {
  const layer = layerAt(state.layer);
  if (query !== null) return layer.weightAt(state.head, query, key);
  return { weight: layer.received[state.head * shape.keys + key] / shape.queries, isBound: false };
}

/** Says which weight is under the pointer, or chosen. */
function readPair({ token, key }) {
  const { weight, isBound } = key === null ? {} : weightOf(token, key);
  byId("map-readout").textContent = key === null ? "Point at a cell, or move with the arrow keys."
    : `${token === null ? "all queries" : `query ${named("query", token)}`} → key ${named("key", key)}: ` +
      (isBound ? "at most " : "") + textOf(weight);
}

/** What the token shown reads in this head, and what reads it. */
function showDetails() {
  const shown = shownToken();
  const link = element("button", { onclick: () => go({ view: "token" }) }, "This token in all heads");
  const hint = element("p", {}, "Choose a token to see what it reads and what reads it.");
  byId("details").replaceChildren(...(shown ? [...tokenParts(sidesOf(shown), [[state.layer, state.head]]), link] : [hint]));
}
