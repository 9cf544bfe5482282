// What the views share: colours, maps of cells on a canvas, lists of tokens and of weights.

const byId = (id) => document.getElementById(id);
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
function pixelsOf(weights, rows, columns, most, canvas = document.createElement("canvas")) {
  [canvas.width, canvas.height] = [columns, rows];
  const pixels = new ImageData(columns, rows);
  const colours = new Uint32Array(pixels.data.buffer);
  const packed = ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r;
  const palette = Array.from({ length: 513 }, (_, i) => packed(colourOf((i / 512) ** 2, 1)));
  weights.forEach((weight, i) => {
    colours[i] = palette[Math.round(Math.sqrt(Math.min(1, weight / most)) * 512)] ?? packed(NOT_FINITE);
  });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

/** The context of an empty canvas of a size in CSS pixels, sharp on any screen. */
function fitted(canvas, width, height) {
  [canvas.width, canvas.height] = [width * devicePixelRatio, height * devicePixelRatio];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  Object.assign(context, { font: "12px system-ui, sans-serif", textBaseline: "middle", imageSmoothingEnabled: false });
  return context;
}

/** Draws weights as cells, with labels of rows and columns (or over a photo), and a mark around one of them. */
function drawMap(canvas, { rows, columns, weights, most, label, photo, mark }) {
  const full = canvas.parentElement.clientWidth;
  const longest = (count, text) => 7 * Math.max(3, ...Array.from({ length: count }, (_, i) => text(i).length)) + 16;
  const limit = full < 500 ? 64 : 116;
  const left = photo ? 2 : Math.min(limit, longest(rows, label.row));
  const above = photo ? 2 : Math.min(limit - 20, longest(columns, label.column));
  const cell = photo ? 520 / columns : 40;
  const width = Math.min(full - left - 2, columns * cell);
  const height = Math.min(rows * cell, Math.max((rows * width) / columns, Math.min(rows * 14, 160)), 720);
  const context = fitted(canvas, full, above + height + 2);
  const [across, down] = [width / columns, height / rows];
  canvas.area = { left, above, width, height, rows, columns };
  canvas.pixels ??= pixelsOf(weights, rows, columns, most);
  if (photo?.naturalWidth) {
    context.drawImage(photo, left, above, width, height);
    context.globalAlpha = 0.6;
  }
  context.drawImage(canvas.pixels, left, above, width, height);
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
      const all = text(i);
      context.fillText([...all].length > room ? `${[...all].slice(0, room - 1).join("")}…` : all, 0, 0, room * 8);
      context.restore();
    }
  };
  context.textAlign = "right";
  if (label) write(rows, down, label.row, mark?.[0], left / 8, (y) => context.translate(left - 6, above + y));
  context.textAlign = "left";
  if (label) {
    write(columns, across, label.column, mark?.[1], above / 8, (x) => {
      context.translate(left + x, above - 6);
      context.rotate(-Math.PI / 2);
    });
  }
  if (!mark) return;
  Object.assign(context, { strokeStyle: colour("--accent"), lineWidth: 2 });
  context.strokeRect(left + mark[1] * across - 1, above + mark[0] * down - 1, across + 2, down + 2);
}

/** What a map answers to: `hover(cell)`, `press(cell)`, `move([down, right])` by arrow keys, `open()` by Enter. */
function mapEvents(canvas, { hover, press, move, open }) {
  const cellAt = (event) => {
    const { left, above, width, height, rows, columns } = canvas.area;
    const [x, y] = [(event.offsetX - left) / width, (event.offsetY - above) / height];
    return x >= 0 && x < 1 && y >= 0 && y < 1 ? [Math.floor(y * rows), Math.floor(x * columns)] : null;
  };
  canvas.addEventListener("pointermove", (event) => hover(cellAt(event)));
  canvas.addEventListener("pointerleave", () => hover(null));
  canvas.addEventListener("click", (event) => cellAt(event) && press(cellAt(event)));
  canvas.addEventListener("keydown", (event) => {
    if (arrow(event)) move(arrow(event));
    else if (event.key === "Enter") open();
    else return;
    event.preventDefault();
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

/** Weights with bars, which can be pressed: `[{ name, weight, text, note, press }]`; the bar of `most` is full. */
function weightList(entries, most) {
  const rows = entries.map(({ name, weight, text = textOf(weight), note = "", press }) => {
    const bar = element("span", { class: "bar" });
    bar.style.width = `${(100 * weight) / most || 0}%`;
    const parts = [bar, element("span", { class: "name" }, name), element("span", {}, text), element("small", {}, note)];
    return element("li", {}, element("button", press ? { onclick: press } : { disabled: "" }, ...parts));
  });
  return element("ol", { class: "weights" }, ...rows);
}

/** Fills a list with tokens, as text that can be selected: `choose(index)`, `open()` on Enter, `hover(index)` or -1. */
function tokenList(list, side, { choose, open, hover = () => {} }) {
  const count = shape[side === "query" ? "queries" : "keys"];
  // Blocks, so that a browser lays out only what is seen.
  for (let start = 0; start < count; start += 64) {
    const tokens = Array.from({ length: Math.min(64, count - start) }, (_, i) => {
      const index = about.hasTokens[side] ? element("span", { class: "index" }, start + i) : "";
      const attributes = { class: "token", role: "option", id: `${list.id}-${start + i}`, "data-index": start + i };
      return element("span", attributes, index, element("bdi", {}, tokenText(side, start + i)), " ");
    });
    list.append(element("div", { class: "block", role: "presentation" }, ...tokens));
  }
  const at = ({ target }) => Number(target.closest?.("[data-index]")?.dataset.index ?? -1);
  list.addEventListener("click", (event) => {
    // The end of a selection of text chooses nothing.
    if (at(event) >= 0 && getSelection().isCollapsed) choose(at(event));
  });
  list.addEventListener("pointerover", (event) => event.pointerType === "mouse" && hover(at(event)));
  list.addEventListener("pointerleave", () => hover(-1));
  list.addEventListener("keydown", (event) => {
    const [chosen, isFlow] = [list.chosen ?? -1, list.classList.contains("flow")];
    const step = arrow(event)?.[0] || (isFlow && arrow(event)?.[1]) || { PageUp: -20, PageDown: 20 }[event.key];
    const to = { Home: 0, End: count - 1 }[event.key] ?? (step && chosen + step);
    if (event.key === "Enter") open();
    else if (to !== undefined) choose(Math.max(0, Math.min(count - 1, to)));
    else return;
    event.preventDefault();
  });
}

/** Marks the chosen token of a list, or none, and brings it into sight. */
function chooseIn(list, index) {
  list.querySelector("[aria-selected]")?.removeAttribute("aria-selected");
  list.chosen = index;
  const token = byId(`${list.id}-${index}`);
  token?.setAttribute("aria-selected", "true");
  list.setAttribute("aria-activedescendant", token?.id ?? "");
  token?.scrollIntoView({ block: "nearest", inline: "nearest" });
}
