// The view of the model: a small map of each head.

const MAP_SIZE = 64;

function buildModel() {
  const { heads, queries, keys } = shape;
  byId("model-summary").textContent =
    `${counted(about.layers.length, "layer")} of ${counted(heads, "head")}, ${counted(queries, "query", "queries")} and ` +
    `${counted(keys, "key")}. In each small map queries go down and keys across; it has the ${shape.top} largest weights ` +
    "of each query, added up in blocks. The number below is the mean entropy in nats: low where a head looks at few keys.";
  const grid = byId("heads");
  grid.style.setProperty("--heads", heads);
  grid.append(element("span", {}, ""));
  for (let head = 0; head < heads; head++) grid.append(element("span", { class: "head-number" }, `${head}`));
  about.layers.forEach(({ name }, layer) => {
    grid.append(element("bdi", { class: "layer-name", title: name }, name || `${layer}`));
    for (let head = 0; head < heads; head++) {
      const button = element("button", {
        type: "button", class: "small-map", id: `map-${layer}-${head}`, "aria-label": headName(layer, head),
        tabindex: layer || head ? -1 : 0, onclick: () => go({ view: "head", layer, head }),
        onfocus: () => describeHead(layer, head), onpointerenter: () => describeHead(layer, head),
      });
      button.append(element("canvas", { "aria-hidden": "true" }), element("small", {}, " "));
      grid.append(button);
    }
  });
  grid.addEventListener("keydown", (event) => {
    const move = arrow(event);
    if (!move || !event.target.id.startsWith("map-")) return;
    const [layer, head] = event.target.id.split("-").slice(1).map(Number);
    focusMap(Math.max(0, Math.min(about.layers.length - 1, layer + move[0])), Math.max(0, Math.min(heads - 1, head + move[1])));
    event.preventDefault();
  });
}

/** Moves the one tab stop of the maps. */
function focusMap(layer, head) {
  byId("heads").querySelectorAll("button[tabindex='0']").forEach((button) => button.setAttribute("tabindex", -1));
  const button = byId(`map-${layer}-${head}`);
  button.setAttribute("tabindex", 0);
  button.focus();
}

function describeHead(layer, head) {
  byId("model-readout").textContent = `${headName(layer, head)}: ${headText(layer, head)}`;
}

/** What there is to say of a head in a line. */
function headText(layer, head) {
  if (!shape.queries || !shape.keys) return "there are no weights";
  const { entropy, notFinite, top, all, mostRead } = summaryOf(layer, head);
  const bad = notFinite ? `${counted(notFinite, "weight")} not finite (grey); ` : "";
  if (!(all > 0)) return `${bad}${notFinite ? "the rest has no weight" : "every key is hidden from every query"}`;
  const received = layerAt(layer).received[head * shape.keys + mostRead];
  const rest = Math.max(0, 1 - top / all);
  const others = layerAt(layer).tile || shape.top === shape.keys ? "" : `; other keys than the ${shape.top} largest have ${percent(rest)}`;
  return `${bad}mean entropy ${entropy.toFixed(2)} nats; most read is ${named("key", mostRead)} with ` +
    `${percent(received / all)} of all weight${others}`;
}

/** Draws the small maps of the layers from one on, a few at a time, so that the page answers meanwhile. */
function drawModel(layer = 0, run = ++drawModel.run) {
  if (layer === about.layers.length || run !== drawModel.run) return;
  const [rows, columns] = [Math.min(MAP_SIZE, shape.queries), Math.min(MAP_SIZE, shape.keys)];
  const start = performance.now();
  for (; layer < about.layers.length && performance.now() - start < 40; layer++) {
    for (let head = 0; head < shape.heads && rows && columns; head++) {
      const [canvas, number] = byId(`map-${layer}-${head}`).children;
      canvas.cells ??= layerAt(layer).coarse(head, rows, columns);
      [canvas.width, canvas.height] = [columns, rows];
      canvas.getContext("2d").drawImage(picture(canvas.cells, rows, columns, 1), 0, 0);
      number.textContent = summaryOf(layer, head).entropy.toFixed(1);
    }
  }
  document.documentElement.dataset.drawn = layer;
  setTimeout(drawModel, 0, layer, run);
}
drawModel.run = 0;
