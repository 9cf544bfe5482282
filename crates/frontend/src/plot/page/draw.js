// Drawing that the views share: maps of cells, lists of tokens and of weights.

const SIDES = ["query", "key"];
const byId = (id) => document.getElementById(id);
const setText = (id, text) => (byId(id).textContent = text);
const range = (count, item) => Array.from({ length: count }, (_, i) => item(i));
const clamp = (index, count) => Math.max(0, Math.min(count - 1, index));

const packed = ([red, green, blue]) => (255 << 24) | (blue << 16) | (green << 8) | red;
/** The colours of 513 weights: lightness changes evenly, so that they can be distinguished without their hue. */
const paletteOf = (stops) => range(513, (i) => {
  const next = stops[Math.ceil(i / 128)];
  return packed(stops[Math.floor(i / 128)].map((low, channel) => Math.round(low + ((i / 128) % 1) * (next[channel] - low))));
});
const PALETTES = {
  dark: paletteOf([[27, 30, 44], [58, 60, 125], [38, 128, 142], [94, 201, 98], [253, 231, 37]]),
  light: paletteOf([[247, 247, 243], [170, 220, 200], [57, 150, 145], [52, 82, 140], [46, 10, 82]]),
};
const NOT_FINITE = packed([150, 150, 150]);
let theme = "light";

/** The colour of a weight, chosen by its square root; `most` has the last colour. */
const colourOf = (weight, most) => PALETTES[theme][Math.round(Math.sqrt(Math.min(1, weight / most)) * 512)] ?? NOT_FINITE;

/** A canvas of one pixel for each weight. */
function pixelsOf({ weights, rows, columns, most }, canvas = document.createElement("canvas")) {
  [canvas.width, canvas.height] = [columns, rows];
  const pixels = new ImageData(columns, rows);
  const colours = new Uint32Array(pixels.data.buffer);
  weights.forEach((weight, i) => (colours[i] = colourOf(weight, most)));
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

/** An element with properties and children; texts become text, never markup. */
function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/**
 * Shows `{ rows, columns, weights, most }` as cells, with `labels` of both sides and one cell `marked`. The pointer
 * calls the map's `describe(cell)`, with null outside, and `press(cell)`, if it is not as arrow keys, `choose(cell)`:
 * these go from the marked cell on, also to cells outside, and first of all to `start`.
 */
function showMap(id, map) {
  const { rows, columns, weights, most, labels = [[], []], isPicture, marked, start = [0, 0] } = map;
  const full = byId(id).clientWidth;
  const room = (texts, limit) => (isPicture ? 2 : Math.min(limit, 16 + 7 * Math.max(3, ...texts.map(({ length }) => length))));
  const [left, above] = [room(labels[0], full < 500 ? 64 : 116), room(labels[1], full < 500 ? 48 : 92)];
  const size = isPicture ? 520 / columns : 40;
  const width = Math.min(full - left - 2, columns * size);
  const height = Math.min(rows * size, Math.max((rows * width) / columns, Math.min(rows * 14, 160)), 720);
  const [down, across] = [height / rows, width / columns];
  const centreOf = ([row, column]) => `top: ${(row + 0.5) * down}px; left: ${(column + 0.5) * across}px`;
  /** Draws the labels that fit, and always that of the mark. */
  const labelsOf = (side, className, size, mark = -Infinity) => labels[side].map((text, i) => {
    if (i !== mark && (i % Math.ceil(15 / size) || Math.abs(i - mark) * size < 15)) return "";
    const style = `--at: ${(i + 0.5) * size}px; color: var(${i === mark ? "--accent" : "--soft"})`;
    return element("span", { className, style }, text);
  });
  const numbers = Array.from(across >= 34 && down >= 16 ? weights : [], (weight, i) => {
    const [red, green, blue] = [0, 8, 16].map((shift) => (colourOf(weight, most) >> shift) & 255);
    const colour = red + 2 * green + blue / 2 > 420 ? "#000" : "#fff";
    const text = Number.isFinite(weight) ? weight.toFixed(2).replace(/^0/, "") : "×";
    const style = `${centreOf([Math.floor(i / columns), i % columns])}; color: ${colour}`;
    return weight === 0 ? "" : element("span", { style }, text);
  });
  const frame = marked && element("span", { className: "mark", style: `${centreOf(marked)}; width: ${across}px; height: ${down}px` });
  const cellAt = ({ offsetX, offsetY }) => [clamp(Math.floor(offsetY / down), rows), clamp(Math.floor(offsetX / across), columns)];
  const canvas = Object.assign(pixelsOf(map), {
    onpointermove: (event) => map.describe(cellAt(event)),
    onpointerleave: () => map.describe(null),
    onclick: (event) => (map.press ?? map.choose)(cellAt(event)),
  });
  const style = `width: ${width}px; height: ${height}px; --left: ${left}px; --above: ${above}px`;
  byId(id).replaceChildren(element("div", { className: isPicture ? "cells is-picture" : "cells", style }, canvas, frame ?? "",
    ...numbers, ...labelsOf(0, "row", down, marked?.[0]), ...labelsOf(1, "column", across, marked?.[1])));
  byId(id).onStep = (step) => map.choose(marked ? marked.map((index, i) => index + step[i]) : start);
  map.describe(null);
}

/** Shows a list of tokens, built when it is first shown, since there may be thousands; at most one is selected. */
function showTokens(id, side, chosen) {
  const list = byId(id);
  const hasIndices = about.hasTokens[side] && list.className !== "flow";
  const elementOf = (text, index) => element(
    "span", { className: "token", role: "option", id: `${id}-${index}`, token: { side, index } },
    hasIndices ? element("span", { className: "index" }, index) : "", element("bdi", {}, text), " ");
  // Blocks, so that a browser lays out only the visible ones.
  for (let start = list.childElementCount * 64; start < tokens[side].length; start += 64) {
    const block = tokens[side].slice(start, start + 64).map((text, i) => elementOf(text, start + i));
    list.append(element("div", { className: "block", role: "presentation" }, ...block));
  }
  // The end of a text selection does not select a token.
  list.onclick = ({ target }) => target.closest(".token") && getSelection().isCollapsed && go(only(target.closest(".token").token));
  list.onStep = ([down, right]) => go(only({ side, index: clamp((chosen ?? -1) + down + right, tokens[side].length) }));
  list.querySelector("[aria-selected]")?.removeAttribute("aria-selected");
  const token = byId(`${id}-${chosen}`);
  list.setAttribute("aria-activedescendant", token?.id ?? "");
  token?.setAttribute("aria-selected", "true");
  token?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

/** Fills a part with the keys that a token attends to and the queries that attend to it, averaged over heads. */
function showWeights(id, sides, heads) {
  const isMean = heads.length > 1;
  const over = isMean ? `, mean over ${counted(heads.length, "head")}` : "";
  const mean = (numberOf) => heads.reduce((sum, [layer, head]) => sum + numberOf(layerAt(layer), head) / heads.length, 0);
  const lists = SIDES.filter((side) => sides[side] !== null).map((side) => {
    const index = sides[side];
    const [verb, partner] = side === "query" ? ["reads", "key"] : ["is read by", "query"];
    const text = side === "query"
      ? `entropy ${mean((layer, head) => layer.entropy[head * shape.queries + index]).toFixed(2)} nats`
      : `receives ${mean((layer, head) => layer.received[head * shape.keys + index]).toFixed(2)} from all queries together`;
    const others = side === "query" && shape.top < shape.keys ? `; other keys than the ${shape.top} largest, or a sink: ` +
      percent(mean((layer, head) => layer.othersOf(head, index).sum)) : "";
    const entries = meanOverHeads(heads, ([layer, head]) => layerAt(layer).partners(side, head, index));
    const rows = entries.slice(0, 12).map(({ index: other, weight, most, head: [layer, head] }) => element("li", {}, element(
      "button", {
        style: `--share: ${(100 * weight) / (isMean ? entries[0].weight : 1) || 0}%`,
        onclick: () => go({ view: "head", layer, head, [side]: index, [partner]: other }),
      },
      element("span", { className: "name" }, tokenName(partner, other)),
      element("span", {}, textOf(weight)),
      element("small", {}, isMean ? `most in ${headName(layer, head)}: ${textOf(most)}` : ""))));
    return element("div", {},
      element("h3", {}, `${tokenName(side, index)} ${verb}`),
      element("p", {}, text + others + over),
      rows.length ? element("ol", { className: "weights" }, ...rows) : element("p", {}, `No ${partner}.`));
  });
  // If one of the buttons had the focus, its replacement gets it.
  const [part, buttons] = [byId(id), () => [...byId(id).querySelectorAll("button")]];
  const focused = buttons().indexOf(document.activeElement);
  part.replaceChildren(...lists);
  buttons()[focused]?.focus();
}
