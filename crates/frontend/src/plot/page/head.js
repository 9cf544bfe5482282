// The view of a head: tokens with lines between them, the map, or the picture.

const ROW = 24; // the height of a token beside the lines, as in page.css
const LEAST_ZOOM = 8; // tokens that are shown at least

/** What a map of cells answers to: `hover(cell)`, `press(cell)` by a pointer or Enter, `move([down, right])` by arrows. */
function matrixEvents(canvas, { size, hover, press, move }) {
  const cell = (event) => cellAt(canvas, event, ...size());
  canvas.addEventListener("pointermove", (event) => hover(cell(event)));
  canvas.addEventListener("pointerleave", () => hover(null));
  canvas.addEventListener("click", (event) => press(cell(event)));
  canvas.addEventListener("keydown", (event) => {
    const step = arrow(event);
    if (step) move(step);
    else if (event.key === "Enter") press(canvas.cell ?? null, true);
    else return;
    event.preventDefault();
  });
}

function buildHead() {
  byId("layer").append(...about.layers.map(({ name }, layer) => element("option", { value: layer }, name ? `${layer}: ${name}` : `${layer}`)));
  byId("number").append(...Array.from({ length: shape.heads }, (_, head) => element("option", { value: head }, `${head}`)));
  byId("layer").addEventListener("change", ({ target }) => go({ layer: Number(target.value) }));
  byId("number").addEventListener("change", ({ target }) => go({ head: Number(target.value) }));
  byId("previous").addEventListener("click", () => moveHead(-1));
  byId("next").addEventListener("click", () => moveHead(1));
  for (const button of document.querySelectorAll("[data-as]")) button.addEventListener("click", () => go({ as: button.dataset.as }));
  byId("zoom-in").addEventListener("click", () => zoom(2));
  byId("zoom-out").addEventListener("click", () => zoom(0.5));
  document.querySelector("[data-as=picture]").hidden = !about.picture;

  for (const side of ["query", "key"]) {
    tokenList(byId(`list-${side}`), side, {
      choose: (index) => go(side === "query" ? { token: index, key: null } : { key: index, token: null }, true),
      open: () => go({ view: "token" }),
      hover: (index) => hoverToken(index === null ? null : { side, index }),
    });
  }
  byId("lines").addEventListener("scroll", drawLines);
  const map = byId("map");
  matrixEvents(map, {
    size: () => [map.drawn.rows, map.drawn.columns],
    hover: (cell) => readPair(cell ? strongest(cell) : chosenPair()),
    press: (cell, isKey) => {
      if (isKey) go({ view: "token" });
      else if (cell) go(strongest(cell), true);
    },
    move: ([down, right]) => {
      const { token, key } = chosenPair() ?? { token: 0, key: -right };
      const inside = (at, count) => Math.max(0, Math.min(count - 1, at));
      go({ token: inside(token + down, shape.queries), key: inside(key + right, shape.keys) }, true);
    },
  });
  if (about.picture) buildPicture();
}

const chosenPair = () => (state.token === null || state.key === null ? null : { token: state.token, key: state.key });

/** The next head, or the last one before, in the order of layers. */
function moveHead(step) {
  const at = state.layer * shape.heads + state.head + step;
  if (at < 0 || at >= about.layers.length * shape.heads) return;
  go({ layer: Math.floor(at / shape.heads), head: at % shape.heads });
}

function showHead() {
  const { layer, head } = state;
  byId("layer").value = layer;
  byId("number").value = head;
  byId("head-name").textContent = capital(headName(layer, head));
  byId("head-summary").textContent = `${capital(headText(layer, head))}.`;
  for (const button of document.querySelectorAll("[data-as]")) button.setAttribute("aria-pressed", button.dataset.as === state.as);
  for (const as of ["lines", "map", "picture"]) byId(`${as}-part`).hidden = as !== state.as;
  if (state.as === "lines") showLines();
  if (state.as === "map") showMap();
  if (state.as === "picture") showPicture();
  showDetails();
}

// Lines.

let hovered = null;

function hoverToken(token) {
  if (token?.side === hovered?.side && token?.index === hovered?.index) return;
  hovered = token;
  drawLines();
  showDetails();
}

/** The token whose lines are shown: the one under the pointer, or the chosen one. */
function shownToken() {
  if (hovered && state.as === "lines") return hovered;
  if (state.token !== null) return { side: "query", index: state.token };
  return state.key === null ? null : { side: "key", index: state.key };
}

function showLines() {
  const lines = byId("lines");
  for (const [side, index] of [["query", state.token], ["key", state.token === null ? state.key : null]]) {
    const token = chooseIn(byId(`list-${side}`), index);
    if (token && (index * ROW < lines.scrollTop || (index + 2) * ROW > lines.scrollTop + lines.clientHeight)) {
      lines.scrollTop = index * ROW - lines.clientHeight / 2;
    }
  }
  drawLines();
}

/** What is read by the token shown, or by all queries in sight: `[query, key, weight]`. */
function shownLines(first, last) {
  const layer = layerAt(state.layer);
  const shown = shownToken();
  if (shown?.side === "key") return layer.readers(state.head, shown.index).map(({ index, weight }) => [index, shown.index, weight]);
  const queries = shown ? [shown.index] : Array.from({ length: Math.max(0, last - first) }, (_, i) => first + i);
  return queries.flatMap((query) => layer.reads(state.head, query).entries.map(({ index, weight }) => [query, index, weight]));
}

function drawLines() {
  if (state.view !== "head" || state.as !== "lines") return;
  const [lines, canvas] = [byId("lines"), byId("links")];
  const [width, height, top] = [canvas.parentElement.clientWidth, lines.clientHeight, lines.scrollTop];
  const context = fitted(canvas, width, height);
  const first = Math.max(0, Math.floor(top / ROW) - 1);
  const links = shownLines(first, Math.min(shape.queries, first + Math.ceil(height / ROW) + 2));
  const y = (index) => (index + 0.5) * ROW - top;
  const shown = shownToken();
  document.querySelectorAll("#lines .is-read").forEach((token) => token.classList.remove("is-read"));
  const lineColour = colour("--accent");
  for (const [query, key, weight] of links.reverse()) {
    const isNumber = Number.isFinite(weight);
    context.strokeStyle = isNumber ? lineColour : `rgb(${NOT_FINITE})`;
    context.setLineDash(isNumber ? [] : [4, 4]);
    context.globalAlpha = isNumber ? Math.max(0.06, Math.sqrt(weight)) : 1;
    context.lineWidth = isNumber ? 0.75 + 3.5 * weight : 1;
    context.beginPath();
    context.moveTo(0, y(query));
    context.bezierCurveTo(width / 2, y(query), width / 2, y(key), width, y(key));
    context.stroke();
    if (shown) byId(shown.side === "query" ? `list-key-${key}` : `list-query-${query}`)?.classList.add("is-read");
  }
  context.globalAlpha = 1;
  if (!shown) return;
  // The weight beside the token at the other end, on a ground of its own.
  for (const [query, key, weight] of links) {
    const [text, at] = shown.side === "query" ? [textOf(weight), y(key)] : [textOf(weight), y(query)];
    if (at < 0 || at > height) continue;
    context.textAlign = shown.side === "query" ? "right" : "left";
    const [x, size] = [shown.side === "query" ? width - 4 : 4, context.measureText(text).width];
    context.fillStyle = colour("--ground");
    context.fillRect(shown.side === "query" ? x - size - 2 : x - 2, at - 8, size + 4, 16);
    context.fillStyle = colour("--text");
    context.fillText(text, x, at);
  }
}

// The map.

let zoomed = 1;
const mapStart = { query: 0, key: 0 };

/** The queries and keys on the map: all, or as many as the zoom leaves. */
function mapWindow() {
  return Object.fromEntries([["query", shape.queries], ["key", shape.keys]].map(([side, count]) => {
    const size = Math.min(count, Math.max(LEAST_ZOOM, Math.ceil(count / zoomed)));
    mapStart[side] = Math.max(0, Math.min(count - size, mapStart[side]));
    return [side, [mapStart[side], mapStart[side] + size]];
  }));
}

/** Zooms around the chosen weight, or the middle. */
function zoom(factor) {
  const before = mapWindow();
  zoomed = Math.max(1, Math.min(zoomed * factor, Math.max(shape.queries, shape.keys, LEAST_ZOOM) / LEAST_ZOOM));
  const after = mapWindow();
  for (const [side, chosen] of [["query", state.token], ["key", state.key]]) {
    const [start, end] = before[side];
    mapStart[side] = Math.round((chosen ?? (start + end) / 2) - (after[side][1] - after[side][0]) / 2);
  }
  showHead();
}

function showMap() {
  const [map, { layer, head }] = [byId("map"), state];
  let { query, key } = mapWindow();
  // What is chosen is in sight.
  for (const [side, [start, end], chosen] of [["query", query, state.token], ["key", key, state.key]]) {
    if (chosen !== null && (chosen < start || chosen >= end)) mapStart[side] = chosen - Math.floor((end - start) / 2);
  }
  ({ query, key } = mapWindow());
  const [rows, columns] = [Math.min(1024, query[1] - query[0]), Math.min(1024, key[1] - key[0])];
  const name = [layer, head, query, key, isDark].join();
  if (map.name !== name) {
    const { largest, notFinite } = summaryOf(layer, head);
    const weights = layerAt(layer).largest(head, { query, key }, rows, columns);
    Object.assign(map, { name, image: null, drawn: { rows, columns, query, key, weights, most: largest || 1, notFinite } });
  }
  const cell = (index, [start, end], count) => Math.floor(((index - start) * count) / (end - start));
  const label = (side, [start, end], count) => (i) => tokenText(side, start + Math.floor((i * (end - start)) / count));
  const mark = chosenPair() && [cell(state.token, query, rows), cell(state.key, key, columns)];
  drawMap(map, { ...map.drawn, mark, label: { row: label("query", query, rows), column: label("key", key, columns) } });
  byId("zoom-in").disabled = rows <= LEAST_ZOOM && columns <= LEAST_ZOOM;
  byId("zoom-out").disabled = zoomed === 1;
  drawScale(map.drawn.most);
  const { tile } = layerAt(layer);
  byId("map-note").textContent =
    `Queries ${query[0]} to ${query[1] - 1} go down, keys ${key[0]} to ${key[1] - 1} across. ` +
    (tile ? "All weights are drawn." : `The ${shape.top} largest weights of each query are drawn, and no others.`) +
    (rows < query[1] - query[0] || columns < key[1] - key[0] ? " A cell has the largest weight of several tokens: zoom in to tell them apart." : "");
  readPair(chosenPair());
}

/** The colours of weights, with the weights that they stand for. */
function drawScale(most) {
  const context = fitted(byId("scale"), 220, 34);
  for (let x = 0; x < 200; x++) {
    context.fillStyle = `rgb(${colourOf((x / 199) ** 2 * most, most)})`;
    context.fillRect(10 + x, 0, 1, 14);
  }
  context.fillStyle = colour("--soft");
  context.textAlign = "center";
  for (const share of [0, 0.5, 1]) context.fillText(share ? (share ** 2 * most).toPrecision(2) : "0", 10 + 200 * share, 25);
}

/** The query and key with the largest weight in a cell of the map. */
function strongest([row, column]) {
  const { rows, columns, query, key } = byId("map").drawn;
  const within = (i, [start, end], count) => [0, 1].map((step) => start + Math.ceil(((i + step) * (end - start)) / count));
  const window = { query: within(row, query, rows), key: within(column, key, columns) };
  let best = { token: window.query[0], key: window.key[0], weight: -1 };
  layerAt(state.layer).forEach(state.head, window, (q, k, weight) => {
    if (weight > best.weight) best = { token: q, key: k, weight };
  });
  return { token: best.token, key: best.key };
}

/** Says which weight is under the pointer or chosen. */
function readPair(pair) {
  byId("map-readout").textContent = pair ? pairText(pair.token, pair.key) : "Point at a cell, or move with the arrow keys.";
}

function pairText(query, key) {
  const { weight, isBound } = layerAt(state.layer).weightAt(state.head, query, key);
  return `query ${named("query", query)} → key ${named("key", key)}: ${isBound ? "at most " : ""}${textOf(weight)}`;
}

// What the chosen or hovered token reads in this head, and what reads it.

function showDetails() {
  const layer = layerAt(state.layer);
  const shown = shownToken();
  const parts = [];
  const query = shown && (shown.side === "query" || about.isSelf) ? shown.index : null;
  const key = shown && (shown.side === "key" || about.isSelf) ? shown.index : null;
  if (query !== null) {
    const { entries, rest } = layer.reads(state.head, query);
    const rows = entries.map(({ index, weight }) => ({ name: named("key", index), weight, press: () => go({ token: query, key: index }, true) }));
    if (rest > 0) rows.push({ name: "other keys", weight: rest, text: percent(rest) });
    parts.push(element("h3", {}, `${named("query", query)} reads`),
      element("p", {}, entries.length ? `entropy ${layer.entropy[state.head * shape.queries + query].toFixed(2)} nats` : "Every key is hidden from it."),
      weightList(rows, 1));
  }
  if (key !== null) {
    const readers = layer.readers(state.head, key);
    const rows = readers.slice(0, 12).map(({ index, weight }) => ({ name: named("query", index), weight, press: () => go({ token: index, key }, true) }));
    parts.push(element("h3", {}, `${named("key", key)} is read by`),
      element("p", {}, `receives ${layer.received[state.head * shape.keys + key].toFixed(2)} in all; is among the ${shape.top} ` +
        `largest of ${counted(readers.length, "query", "queries")}`),
      weightList(rows, 1));
  }
  if (shown) parts.push(element("button", { type: "button", onclick: () => go({ view: "token" }) }, "This token in all heads"));
  else parts.push(element("p", {}, "Choose a token to see what it reads and what reads it."));
  byId("details").replaceChildren(...parts);
}
