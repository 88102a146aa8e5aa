// Tenants, where there are some.
const tenantRows = new Map();
const tenantBefore = (name) => (before().tenants || []).find((one) => one.name === name) || null;

function limited(used, limit, share, word) {
  return limit === null ? "no limit" : `of ${number(limit)}${word}` + (share < 1 ? `, ${percent(share, 1)} of it here` : "");
}

function tenantCells(one) {
  const old = tenantBefore(one.name), rate = (key) => old && history.length > 1 ? (one.fleet[key] - old.fleet[key]) / elapsed() : null;
  const {requests_per_s: requests, tokens_per_s: most, concurrent, share} = one.limits;
  const turned = sum(Object.values(one.turned_away)), [part, whole, when] = hits(one, old), used = one.fleet.in_flight;
  return [
    [one.name, one.weight === 1 ? "" : `weight ${number(one.weight, 1)}`],
    [number(used), `${limited(used, concurrent, share, "")}; ${number(one.held)} held here`, "", concurrent ? used / concurrent : 0],
    [number(rate("requests"), 1), limited(0, requests, share, "/s"), "", requests ? rate("requests") / requests : 0],
    [number(rate("charged_tokens")), limited(0, most, share, "/s"), "", most ? rate("charged_tokens") / most : 0],
    [percent(part, whole), when, "", whole ? part / whole : 0],
    [one.ttft_mean_ms === null ? "–" : seconds(one.ttft_mean_ms / 1000), "since start"],
    [number(turned), pairs(one.turned_away), turned ? "watch" : ""],
  ];
}

const TENANT_COLUMNS = ["Tenant", "In flight", "Requests/s", "Tokens/s", "Hit share", "TTFT mean", "Turned away"];

function drawTenants(tenants) {
  byId("tenants-part").hidden = byId("to-tenants").hidden = !tenants.length;
  const wanted = byId("tenant-filter").value.trim().toLowerCase();
  const shown = tenants.filter((one) => one.name.toLowerCase().includes(wanted)), names = new Set(tenants.map((one) => one.name));
  for (const name of [...tenantRows.keys()]) if (!names.has(name)) tenantRows.delete(name);
  arrange(byId("tenants"), shown.map((one) => {
    if (!tenantRows.has(one.name)) {
      const row = element("tr");
      TENANT_COLUMNS.forEach((label, at) => cell(row, label, "", "", at > 0 && at < 5 ? 0 : undefined));
      tenantRows.set(one.name, row);
    }
    const row = tenantRows.get(one.name);
    tenantCells(one).forEach((texts, at) => setCell(row.children[at], ...texts));
    return row;
  }));
  put(byId("tenants-shown"), `${shown.length} of ${tenants.length}`);
}
