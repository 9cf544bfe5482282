// A head's weights over the picture whose patches the keys are.

let image = null;

function buildPicture() {
  image = new Image();
  image.onload = () => state.view === "head" && state.as === "picture" && showPicture();
  image.src = `data:image/${about.picture.kind};base64,${byId("picture-data").textContent}`;
  const { rows, columns, leading } = about.picture;
  const canvas = byId("patches");
  const keyOf = ([row, column]) => leading + row * columns + column;
  matrixEvents(canvas, {
    size: () => [rows, columns],
    hover: (cell) => readPatch(cell && keyOf(cell)),
    press: (cell, isKey) => {
      if (isKey) go({ view: "token" });
      else if (cell) go(about.isSelf ? { token: keyOf(cell), key: null } : { key: keyOf(cell) }, true);
    },
    move: ([down, right]) => {
      const at = Math.max(leading, (about.isSelf ? state.token : state.key) ?? leading) + down * columns + right;
      if (at >= leading && at < shape.keys) go(about.isSelf ? { token: at, key: null } : { key: at }, true);
    },
  });
  for (let index = 0; index < (about.isSelf ? leading : shape.queries); index++) {
    byId("leading").append(element("button", { type: "button", onclick: () => go({ token: index, key: null }, true) }, named("query", index)));
  }
}

/** What a patch has: the weight that the chosen query gives it, or what it receives from all queries in the mean. */
function patchWeight(key) {
  if (state.token === null) return { weight: layerAt(state.layer).received[state.head * shape.keys + key] / shape.queries, isBound: false };
  return layerAt(state.layer).weightAt(state.head, state.token, key);
}

function showPicture() {
  const { rows, columns, leading } = about.picture;
  const canvas = byId("patches");
  const patches = Array.from({ length: rows * columns }, (_, i) => {
    const { weight, isBound } = patchWeight(leading + i);
    return isBound ? 0 : weight;
  });
  const most = Math.max(...patches.filter(Number.isFinite)) || 1;
  const width = Math.min(canvas.parentElement.clientWidth, 520);
  const height = Math.round((width * rows) / columns);
  const context = fitted(canvas, width, height);
  canvas.area = [0, 0, width, height];
  if (image.complete && image.naturalWidth) context.drawImage(image, 0, 0, width, height);
  const [across, down] = [width / columns, height / rows];
  patches.forEach((weight, i) => {
    context.fillStyle = `rgb(${colourOf(weight, most)} / ${Number.isFinite(weight) ? 0.35 + 0.4 * Math.sqrt(weight / most) : 0.9})`;
    context.fillRect((i % columns) * across, Math.floor(i / columns) * down, across, down);
  });
  const chosen = about.isSelf ? state.token : state.key;
  if (chosen !== null && chosen >= leading) {
    const i = chosen - leading;
    Object.assign(context, { strokeStyle: "#fff", lineWidth: 2 });
    context.strokeRect((i % columns) * across, Math.floor(i / columns) * down, across, down);
  }
  byId("picture-note").textContent =
    (state.token === null ? "The mean weight that patches receive" : `What query ${named("query", state.token)} reads`) +
    `, on a scale from 0 to ${textOf(most)}.` +
    (state.token === null || layerAt(state.layer).tile ? "" : ` The ${shape.top} largest weights are drawn, and no others.`);
  readPatch(chosen !== null && chosen >= leading ? chosen : null);
}

function readPatch(key) {
  const { weight, isBound } = key === null ? {} : patchWeight(key);
  byId("picture-readout").textContent = key === null ? "Point at a patch, or move with the arrow keys."
    : `key ${named("key", key)}: ${isBound ? "at most " : ""}${textOf(weight)}`;
}
