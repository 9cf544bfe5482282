// What the views share: colours, maps of cells on a canvas, lists of tokens and of weights.

const byId = (id) => document.getElementById(id);
/** A colour of the style sheet, by its name there. */
const colour = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();

/** From the weight 0 to the largest; lightness changes evenly, so that they are told apart without their hue. */
const STOPS = {
  dark: [[27, 30, 44], [58, 60, 125], [38, 128, 142], [94, 201, 98], [253, 231, 37]],
  light: [[247, 247, 243], [170, 220, 200], [57, 150, 145], [52, 82, 140], [46, 10, 82]],
};
const NOT_FINITE = [150, 150, 150];
let isDark = false;

/** The colour of a weight on a scale from 0 to `most`, which grows with the weight's square root. */
function colourOf(weight, most) {
  if (!Number.isFinite(weight)) return NOT_FINITE;
  const stops = isDark ? STOPS.dark : STOPS.light;
  const at = Math.sqrt(Math.min(1, weight / most)) * (stops.length - 1) || 0;
  const [i, share] = [Math.min(Math.floor(at), stops.length - 2), at - Math.min(Math.floor(at), stops.length - 2)];
  return stops[i].map((channel, c) => Math.round(channel + share * (stops[i + 1][c] - channel)));
}
const isLight = ([r, g, b]) => 0.2126 * (r / 255) ** 2.2 + 0.7152 * (g / 255) ** 2.2 + 0.0722 * (b / 255) ** 2.2 > 0.18;

/** A canvas of one pixel for each weight. */
function picture(weights, rows, columns, most) {
  const canvas = Object.assign(document.createElement("canvas"), { width: columns, height: rows });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(columns, rows);
  const palette = Array.from({ length: 1025 }, (_, i) => colourOf((i / 1024) ** 2, 1));
  weights.forEach((weight, i) => {
    const step = Math.round(Math.sqrt(Math.min(1, weight / most)) * 1024);
    pixels.data.set(palette[step] ?? NOT_FINITE, 4 * i);
    pixels.data[4 * i + 3] = 255;
  });
  context.putImageData(pixels, 0, 0);
  return canvas;
}

/** A canvas fitted to the pixels of the screen, empty, in units of CSS pixels. */
function fitted(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  return context;
}

/** A text, or as much of it as fits; characters of a script stay together, since none is cut within a code point. */
function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  const characters = [...text.slice(0, 200)];
  while (characters.length && context.measureText(`${characters.join("")}…`).width > width) characters.pop();
  return `${characters.join("")}…`;
}

/**
 * A map of cells with labels at the left and above: `{ rows, columns, weights, most, label: { row, column }, mark }`,
 * `mark` being a row and a column. Sets `canvas.area`, where the cells are: left, top, width and height.
 */
function drawMap(canvas, { rows, columns, weights, most, label, mark }) {
  const full = canvas.parentElement.clientWidth;
  const [left, above] = full < 500 ? [64, 64] : [110, 92];
  const width = Math.min(full - left - 2, columns * 46);
  const height = Math.min(rows * 46, Math.max(rows * Math.min(width / columns, 46), Math.min(rows * 14, 160)), 720);
  const context = fitted(canvas, full, above + height + 2);
  canvas.area = [left, above, width, height];
  const [across, down] = [width / columns, height / rows];
  canvas.image ??= picture(weights, rows, columns, most);
  context.imageSmoothingEnabled = false;
  context.drawImage(canvas.image, left, above, width, height);
  context.strokeStyle = colour("--line");
  context.strokeRect(left - 0.5, above - 0.5, width + 1, height + 1);
  if (across >= 34 && down >= 16) {
    context.textAlign = "center";
    weights.forEach((weight, i) => {
      if (weight === 0) return;
      const [x, y] = [left + ((i % columns) + 0.5) * across, above + (Math.floor(i / columns) + 0.5) * down];
      context.fillStyle = isLight(colourOf(weight, most)) ? "#000" : "#fff";
      context.fillText(Number.isFinite(weight) ? weight.toFixed(2).replace(/^0/, "") : "×", x, y);
    });
  }
  // Labels of every n-th row and column, and those of the mark.
  const labels = (count, size, text, marked, place) => {
    const every = Math.ceil(15 / size);
    for (let i = 0; i < count; i++) {
      const isNear = marked !== undefined && i !== marked && Math.abs(i - marked) * size < 15;
      if (i !== marked && (i % every || isNear)) continue;
      context.fillStyle = colour(i === marked ? "--accent" : "--soft");
      context.save();
      place((i + 0.5) * size);
      context.fillText(shortened(context, text(i), (place === atLeft ? left : above) - 10), 0, 0);
      context.restore();
    }
  };
  const atLeft = (y) => {
    context.textAlign = "right";
    context.translate(left - 6, above + y);
  };
  const atTop = (x) => {
    context.textAlign = "left";
    context.translate(left + x, above - 6);
    context.rotate(-Math.PI / 2);
  };
  labels(rows, down, label.row, mark?.[0], atLeft);
  labels(columns, across, label.column, mark?.[1], atTop);
  if (mark) {
    const [x, y] = [left + mark[1] * across, above + mark[0] * down];
    context.strokeStyle = colour("--accent");
    context.lineWidth = 2;
    context.strokeRect(x - 1, y - 1, Math.max(across, 3) + 2, Math.max(down, 3) + 2);
  }
}

/** The row and column of a map's cell at a pointer, if there is one. */
function cellAt(canvas, event, rows, columns) {
  if (!canvas.area) return null;
  const box = canvas.getBoundingClientRect();
  const [left, top, width, height] = canvas.area;
  const [x, y] = [(event.clientX - box.left - left) / width, (event.clientY - box.top - top) / height];
  if (!(x >= 0 && x < 1 && y >= 0 && y < 1)) return null;
  return [Math.floor(y * rows), Math.floor(x * columns)];
}

/** An element with attributes and children; texts become text, never markup. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** A list of weights with bars, each of which can be pressed: `[{ name, weight, text, note, press }]`. */
function weightList(entries, most = Math.max(...entries.map(({ weight }) => weight || 0))) {
  const rows = entries.map(({ name, weight, text, note, press }) => {
    const bar = element("span", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${Number.isFinite(weight) ? Math.min(100, (100 * weight) / most || 0) : 0}%`;
    const parts = [bar, element("bdi", { class: "name" }, name), element("span", { class: "number" }, text ?? textOf(weight))];
    if (note) parts.push(element("small", {}, note));
    return element("li", {}, press ? element("button", { type: "button", onclick: press }, ...parts) : element("div", {}, ...parts));
  });
  return element("ol", { class: "weights" }, ...rows);
}

/**
 * Fills an element with tokens as text that can be selected. They are pressed, or chosen by arrow keys: `choose(index)`,
 * `open(index)` on Enter, `hover(index)` as a pointer comes (with no index as it goes).
 */
function tokenList(list, side, { choose, open, hover }) {
  const tokens = tokensOf(side);
  // Blocks, so that a browser lays out only what is seen.
  for (let start = 0; start < tokens.length; start += 64) {
    const block = element("div", { class: "block", role: "presentation" });
    tokens.slice(start, start + 64).forEach((token, i) => {
      const number = element("span", { class: "index", "aria-hidden": "true" }, hasTokens(side) ? `${start + i}` : "");
      const attributes = { role: "option", id: `${list.id}-${start + i}`, "data-index": start + i, title: `${start + i}` };
      block.append(element("span", { class: "token", ...attributes }, number, element("bdi", {}, token)), " ");
    });
    list.append(block);
  }
  const indexAt = ({ target }) => {
    const index = target.closest?.("[data-index]")?.dataset.index;
    return index === undefined ? null : Number(index);
  };
  list.addEventListener("click", (event) => {
    // The end of a selection of text is no choice.
    if (indexAt(event) !== null && getSelection().isCollapsed) choose(indexAt(event));
  });
  list.addEventListener("pointerover", (event) => event.pointerType === "mouse" && hover?.(indexAt(event)));
  list.addEventListener("pointerleave", () => hover?.(null));
  list.addEventListener("keydown", (event) => {
    const at = list.chosen ?? -1;
    const last = tokens.length - 1;
    const steps = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + 20, PageUp: at - 20, Home: 0, End: last };
    if (list.classList.contains("flow")) Object.assign(steps, { ArrowRight: at + 1, ArrowLeft: at - 1 });
    if (event.shiftKey || last < 0) return;
    if (event.key === "Enter" && at >= 0) open(at);
    else if (event.key in steps) choose(Math.max(0, Math.min(last, steps[event.key])));
    else return;
    event.preventDefault();
  });
}

/** Marks the chosen token of a list, and scrolls to it. */
function chooseIn(list, index) {
  list.querySelector("[aria-selected]")?.removeAttribute("aria-selected");
  list.chosen = index;
  const token = index === null ? null : byId(`${list.id}-${index}`);
  token?.setAttribute("aria-selected", "true");
  if (token) list.setAttribute("aria-activedescendant", token.id);
  else list.removeAttribute("aria-activedescendant");
  return token;
}
