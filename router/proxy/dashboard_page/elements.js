// Elements. Names, URLs and models come from configs and other machines: they are set as text, never parsed as markup.
const byId = (id) => document.getElementById(id);

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

/** Set a text only when it changed: screen readers and selections are left in peace. */
function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Make `rows` the children of `body`, touching nothing if they are. */
function arrange(body, rows) {
  if (rows.length !== body.children.length || rows.some((row, index) => row !== body.children[index])) body.replaceChildren(...rows);
}

/** One cell: a value, a note below it, a bar if it has a share. */
function cell(row, label, value, note, share) {
  const td = element("td"), box = element("div");
  td.dataset.label = label;
  box.append(element("span", value), element("small", note || ""));
  if (share !== undefined) {
    const line = element("div", undefined, "track");
    line.append(element("div"));
    box.append(line);
    setBar(line, share);
  }
  td.append(box);
  row.append(td);
  return td;
}

function setBar(line, share) {
  line.firstChild.style.width = `${Math.max(0, Math.min(100, 100 * share)).toFixed(1)}%`;
}

/** Change what `cell` made. */
function setCell(td, value, note, look, share) {
  const [span, small, line] = td.firstChild.children;
  put(span, value);
  put(small, note || "");
  span.className = look || "";
  if (line) setBar(line, share);
}

/** A line over time, from 0 up; points without a value are left out. */
function drawLine(svg, points) {
  const most = Math.max(...points.filter((point) => point !== null), 1e-9), line = svg.firstChild;
  const placed = points.flatMap((point, at) => point === null ? [] : [`${(100 * (at + TREND_POINTS - points.length) / (TREND_POINTS - 1)).toFixed(1)},${(23 - 22 * point / most).toFixed(1)}`]);
  line.setAttribute("points", placed.join(" "));
}

/** A figure with a title, a note, and a line if `point` is given (null: no value now). */
function show(name, title, text, note = "", point = undefined) {
  let box = byId(`figure-${name}`);
  if (!box) {
    box = element("div");
    box.id = `figure-${name}`;
    box.append(element("dt", title), element("dd"));
    box.lastChild.append(element("span"), element("small"));
    if (point !== undefined) box.lastChild.append(byId("line").content.cloneNode(true));
    byId("traffic").append(box);
  }
  const [value, small, svg] = box.lastChild.children;
  put(value, text);
  put(small, note);
  if (svg) drawLine(svg, trend(name, point));
}
