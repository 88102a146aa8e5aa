// The table of replicas: sorted, filtered, one row per replica kept as long as it is there.
let sorting = {column: null, ascending: true};
const replicaRows = new Map();
const failures = (replica) => sum(Object.entries(replica.traffic.statuses).filter(([status]) => Number(status) >= 500).map(([, count]) => count));
const replicaHits = (r) => hits(r.cache, (replicaBefore(r.name) || {}).cache);
const filled = (r) => r.index.tokens / (r.index.capacity_tokens || 1);

// title, what it is sorted by, [text, note, class, share of a bar]
const COLUMNS = [
  ["Replica", (r) => r.name, (r) => [r.name, [r.url, ...r.tags].join(" · ")]],
  ["Health", (r) => healthOf(r)[1], (r) => { const [sign, word, look] = healthOf(r); return [`${sign} ${word}`, r.usable ? "" : "no new work", look]; }],
  ["In flight", (r) => r.queued + r.decoding, (r) => [number(r.queued + r.decoding), `${number(r.queued)} queued, ${number(r.decoding)} decoding`]],
  ["Wait ms", (r) => r.wait_ms, (r) => [number(r.wait_ms), `${(100 * r.utilization).toFixed(0)}% busy with prefill`]],
  ["Held", (r) => r.held, (r) => [number(r.held)]],
  ["Cache fill", filled, (r) => [percent(r.index.tokens, r.index.capacity_tokens), `${tokens(r.index.tokens)} of ${tokens(r.index.capacity_tokens)} tokens`, "", filled(r)]],
  ["Hit share", (r) => { const [part, whole] = replicaHits(r); return whole ? part / whole : -1; }, (r) => { const [part, whole, when] = replicaHits(r); return [percent(part, whole), when, "", whole ? part / whole : 0]; }],
  ["Cache credit", (r) => r.cache.recent_ratio === null ? -1 : r.cache.recent_ratio, (r) => [(r.cache.alert ? "▲ " : "") + (r.cache.recent_ratio === null ? "–" : `${(100 * r.cache.recent_ratio).toFixed(0)}%`), `${tokens(r.cache.cached_tokens)} reported of ${tokens(r.cache.predicted_tokens)} predicted`, r.cache.alert ? "bad" : ""]],
  ["Speed factor", (r) => r.calibration.prefill_factor, (r) => [`× ${number(r.calibration.prefill_factor, 2)}`, `decode × ${number(r.calibration.decode_factor, 2)}; ${number(r.calibration.prefills_seen)} seen`]],
  ["Decisions", (r) => sum(Object.values(r.traffic.decisions)), (r) => [number(sum(Object.values(r.traffic.decisions))), pairs(r.traffic.decisions)]],
  ["Errors", failures, (r) => [number(failures(r)), failures(r) ? pairs(r.traffic.statuses) : "", failures(r) ? "bad" : ""]],
];
const WITH_BAR = new Set(["Cache fill", "Hit share"]);

function drawColumns() {
  COLUMNS.forEach(([title], column) => {
    const th = element("th"), button = element("button", title);
    th.scope = "col";
    button.type = "button";
    button.addEventListener("click", () => {
      sorting = {column, ascending: sorting.column === column ? !sorting.ascending : column < 2};
      for (const [other, node] of [...byId("columns").children].entries()) {
        node.removeAttribute("aria-sort");
        if (other === column) node.setAttribute("aria-sort", sorting.ascending ? "ascending" : "descending");
      }
      if (last) drawReplicas(last.replicas);
    });
    th.append(button);
    byId("columns").append(th);
  });
}

function replicaRow(name) {
  let row = replicaRows.get(name);
  if (!row) {
    row = element("tr");
    for (const [title] of COLUMNS) cell(row, title, "", "", WITH_BAR.has(title) ? 0 : undefined);
    replicaRows.set(name, row);
  }
  return row;
}

function isShown(replica) {
  const wanted = byId("filter").value.trim().toLowerCase(), wellness = byId("wellness").value;
  if (wellness === "usable" && !replica.usable) return false;
  if (wellness === "unwell" && healthOf(replica)[1] === "healthy") return false;
  return [replica.name, replica.url, healthOf(replica)[1], ...replica.tags].join(" ").toLowerCase().includes(wanted);
}

function drawReplicas(replicas) {
  const shown = replicas.filter(isShown);
  if (sorting.column !== null) {
    const by = COLUMNS[sorting.column][1], way = sorting.ascending ? 1 : -1;
    shown.sort((a, b) => way * (by(a) < by(b) ? -1 : by(a) > by(b) ? 1 : 0));
  }
  const names = new Set(replicas.map((replica) => replica.name));
  for (const name of [...replicaRows.keys()]) if (!names.has(name)) replicaRows.delete(name);
  arrange(byId("replicas"), shown.map((replica) => {
    const row = replicaRow(replica.name);
    COLUMNS.forEach(([, , draw], column) => setCell(row.children[column], ...draw(replica)));
    return row;
  }));
  put(byId("shown"), `${shown.length} of ${replicas.length}; ${replicas.filter((r) => r.usable).length} usable`);
}
