// What the views share: colours, maps of cells on a canvas, lists of tokens and of weights.

const byId = (id) => document.getElementById(id);
const on = (id, event, listener) => byId(id).addEventListener(event, listener);
const range = (count, item) => Array.from({ length: count }, (_, i) => item(i));
const inside = (at, count) => Math.max(0, Math.min(count - 1, at));
/** A colour of the style sheet, by its name there. */
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
/** From the weight 0 to the largest: lightness changes evenly, so that they are told apart without their hue. */
const STOPS = {
  dark: [[27, 30, 44], [58, 60, 125], [38, 128, 142], [94, 201, 98], [253, 231, 37]],
  light: [[247, 247, 243], [170, 220, 200], [57, 150, 145], [52, 82, 140], [46, 10, 82]],
};
const NOT_FINITE = [150, 150, 150];
let isDark = false;

/** The colour of a weight, which goes by its square root; `most` has the last. */
function colourOf(weight, most) {
  if (!Number.isFinite(weight)) return NOT_FINITE;
  const stops = STOPS[isDark ? "dark" : "light"];
  const at = Math.sqrt(Math.min(1, weight / most)) * (stops.length - 1);
  const [low, high] = [stops[Math.floor(at)], stops[Math.ceil(at)]];
  return low.map((channel, i) => Math.round(channel + (at % 1) * (high[i] - channel)));
}

/** A canvas of one pixel for each weight. */
function pixelsOf({ weights, rows, columns, most }, canvas = document.createElement("canvas")) {
  [canvas.width, canvas.height] = [columns, rows];
  const pixels = new ImageData(columns, rows);
  const packed = ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r;
  const palette = range(513, (i) => packed(colourOf((i / 512) ** 2, 1)));
  const colourAt = (weight) => palette[Math.round(Math.sqrt(Math.min(1, weight / most)) * 512)] ?? packed(NOT_FINITE);
  new Uint32Array(pixels.data.buffer).forEach((_, i, colours) => (colours[i] = colourAt(weights[i])));
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

/** The context of an empty canvas of a size in CSS pixels, sharp on any screen. */
function fitted(canvas, width, height) {
  [canvas.width, canvas.height] = [width * devicePixelRatio, height * devicePixelRatio];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  return Object.assign(context, { font: "12px system-ui, sans-serif", textBaseline: "middle", imageSmoothingEnabled: false });
}

/** Draws weights as cells, with labels of rows and columns (or over a photo), and a mark around one of them. */
function drawMap(canvas, map) {
  const { rows, columns, weights, most, label, photo, mark } = map;
  const full = canvas.parentElement.clientWidth;
  const room = (count, text, limit) => Math.min(limit, 16 + 7 * Math.max(3, ...range(count, (i) => text(i).length)));
  const left = photo ? 2 : room(rows, label.row, full < 500 ? 64 : 116);
  const above = photo ? 2 : room(columns, label.column, full < 500 ? 48 : 92);
  const cell = photo ? 520 / columns : 40;
  const width = Math.min(full - left - 2, columns * cell);
  const height = Math.min(rows * cell, Math.max((rows * width) / columns, Math.min(rows * 14, 160)), 720);
  const [across, down] = [width / columns, height / rows];
  canvas.area = { left, above, width, height, rows, columns };
  const context = fitted(canvas, full, above + height + 2);
  if (photo?.naturalWidth) context.drawImage(photo, left, above, width, height);
  context.globalAlpha = photo ? 0.6 : 1;
  context.drawImage(pixelsOf(map), left, above, width, height);
  Object.assign(context, { globalAlpha: 1, strokeStyle: colour("--line"), textAlign: "center" });
  context.strokeRect(left, above, width, height);
  for (let i = 0; across >= 34 && down >= 16 && i < weights.length; i++) {
    if (weights[i] === 0) continue;
    const [r, g, b] = colourOf(weights[i], most);
    context.fillStyle = r + 2 * g + b / 2 > 420 ? "#000" : "#fff";
    const text = Number.isFinite(weights[i]) ? weights[i].toFixed(2).replace(/^0/, "") : "×";
    context.fillText(text, left + ((i % columns) + 0.5) * across, above + (Math.floor(i / columns) + 0.5) * down);
  }
  /** The labels of a side that have room, and always that of the mark. */
  const write = (count, size, text, marked, room, place) => {
    for (let i = 0; i < count; i++) {
      const isNear = Math.abs(i - marked) * size < 15;
      if (i !== marked && (i % Math.ceil(15 / size) || isNear)) continue;
      context.save();
      context.fillStyle = colour(i === marked ? "--accent" : "--soft");
      place((i + 0.5) * size);
      const [characters, most] = [[...text(i)], Math.floor((room - 8) / 7)];
      context.fillText(characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : text(i), 0, 0, room - 6);
      context.restore();
    }
  };
  if (label) {
    context.textAlign = "right";
    write(rows, down, label.row, mark?.[0], left, (y) => context.translate(left - 6, above + y));
    context.textAlign = "left";
    write(columns, across, label.column, mark?.[1], above, (x) => context.setTransform(
      new DOMMatrix().scale(devicePixelRatio).translate(left + x, above - 6).rotate(-90)));
  }
  if (!mark) return;
  Object.assign(context, { strokeStyle: colour("--accent"), lineWidth: 2 });
  context.strokeRect(left + mark[1] * across - 1, above + mark[0] * down - 1, across + 2, down + 2);
}

/** What a map answers to: `hover(cell)`, `press(cell)`, `move([down, right])` by arrow keys, `open()` by Enter. */
function mapEvents(id, { hover, press, move, open }) {
  const cellAt = ({ offsetX, offsetY }) => {
    const { left, above, width, height, rows, columns } = byId(id).area;
    const [x, y] = [(offsetX - left) / width, (offsetY - above) / height];
    return x >= 0 && x < 1 && y >= 0 && y < 1 ? [Math.floor(y * rows), Math.floor(x * columns)] : null;
  };
  on(id, "pointermove", (event) => hover(cellAt(event)));
  on(id, "pointerleave", () => hover(null));
  on(id, "click", (event) => cellAt(event) && press(cellAt(event)));
  on(id, "keydown", (event) => {
    if (!arrow(event) && event.key !== "Enter") return;
    event.preventDefault();
    if (arrow(event)) move(arrow(event));
    else open();
  });
}

/** An element with attributes, listeners (`onclick`) and children; texts become text, never markup. */
function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** Weights with bars, which can be pressed: `[{ name, weight, note, press }]`; the bar of `most` is full. */
function weightList(entries, most) {
  return element("ol", { class: "weights" }, ...entries.map(({ name, weight, note, press }) => {
    const bar = element("span", { class: "bar" });
    bar.style.width = `${(100 * weight) / most || 0}%`;
    const texts = [element("span", { class: "name" }, name), element("span", {}, textOf(weight)), element("small", {}, note)];
    return element("li", {}, element("button", { onclick: press }, bar, ...texts));
  }));
}

/** Fills a list with tokens, as text that can be selected: `choose(index)`, `open()` on Enter, `hover(index)` or -1. */
function tokenList(id, side, { choose, open, hover = () => {} }) {
  const [list, count] = [byId(id), countOf(side)];
  const isFlow = list.className === "flow";
  const token = (index) => element(
    "span", { class: "token", role: "option", id: `${id}-${index}`, "data-index": index },
    about.hasTokens[side] && !isFlow ? element("span", { class: "index" }, index) : "",
    element("bdi", {}, tokenText(side, index)), " ");
  // Blocks, so that a browser lays out only what is seen.
  for (let start = 0; start < count; start += 64) {
    const tokens = range(Math.min(64, count - start), (i) => token(start + i));
    list.append(element("div", { class: "block", role: "presentation" }, ...tokens));
  }
  const at = ({ target }) => Number(target.closest?.("[data-index]")?.dataset.index ?? -1);
  // The end of a selection of text chooses nothing.
  on(id, "click", (event) => at(event) >= 0 && getSelection().isCollapsed && choose(at(event)));
  on(id, "pointerover", (event) => event.pointerType === "mouse" && hover(at(event)));
  on(id, "pointerleave", () => hover(-1));
  on(id, "keydown", (event) => {
    const [down, right] = arrow(event) ?? [0, 0];
    const step = down || (isFlow && right) || { PageUp: -20, PageDown: 20 }[event.key];
    const to = { Home: 0, End: count - 1 }[event.key] ?? (step ? (list.chosen ?? -1) + step : undefined);
    if (to === undefined && event.key !== "Enter") return;
    event.preventDefault();
    if (to === undefined) open();
    else choose(inside(to, count));
  });
}

/** Marks the chosen token of a list, or none, and brings it into sight. */
function chooseIn(list, index) {
  list.querySelector("[aria-selected]")?.removeAttribute("aria-selected");
  const token = byId(`${list.id}-${index}`);
  list.chosen = index;
  list.setAttribute("aria-activedescendant", token?.id ?? "");
  token?.setAttribute("aria-selected", "true");
  token?.scrollIntoView({ block: "nearest", inline: "nearest" });
}
