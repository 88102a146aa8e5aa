// The last decisions as they come, and the prefixes that their prompts share.
const SHOWN_DECISIONS = 60;
const WORDS = new Set(["Reason", "Replica", "Why", "Cached on"]);
const decisionRows = new Map();
let decisions = [];

/** Why it went there, in words; figures are predictions. */
function why(one) {
  const ms = (value) => `${number(value)} ms`;
  if (one.reason === "spill" && one.spill_saved_ms !== null) return `${ms(one.spill_saved_ms)} less prefill where it is warmer, but ${one.extra_wait_ms >= 1 ? `${ms(one.extra_wait_ms)} more queue` : "others would wait for it there"}`;
  if (one.reason === "cold") return "nobody holds any of it";
  if (one.reason === "retry") return "an earlier try failed";
  if (one.reason === "panic") return "no replica is known to be well";
  if (one.matched_tokens) return `${tokens(one.matched_tokens)} tokens cached there`;
  return {only: "no other may take it", session: "the session's home", balanced: "least load"}[one.reason] || "";
}

function outcome(one) {
  if (one.retried) return ["tried again", "", "watch"];
  if (one.status === null) return [one.ttft_ms === null ? "waits" : "streams", one.ttft_ms === null ? "" : `first token ${number(one.ttft_ms)} ms`, "faint"];
  const look = one.status >= 500 ? "bad" : one.status >= 400 ? "watch" : "good";
  const text = one.status === 499 ? "client left" : String(one.status);
  return [`${look === "good" ? "●" : look === "bad" ? "✕" : "▲"} ${text}`, one.ttft_ms === null ? "" : `first token ${number(one.ttft_ms)} ms`, look];
}

function words(row, ...cells) {
  for (const [label, ...rest] of cells) {
    const td = cell(row, label, ...rest);
    if (WORDS.has(label)) td.classList.add("word");
  }
  return row;
}

function decisionRow(one) {
  let row = decisionRows.get(one.number);
  if (!row) {
    const time = new Date(Date.now() - 1000 * one.age_s).toLocaleTimeString("en-GB");
    row = words(element("tr"), ["When, request", time, one.request_id], ["Reason", one.reason], ["Replica", one.replica, [one.model, one.tenant].filter(Boolean).join(" · ")],
      ["Saved ms", number(one.saved_ms)], ["Wait ms", number(one.wait_ms), `+ ${number(one.prefill_ms)} prefill`], ["Why", why(one)], ["Outcome", ""]);
    decisionRows.set(one.number, row);
  }
  setCell(row.lastChild, ...outcome(one));
  return row;
}

function drawDecisions() {
  const wanted = byId("decision-filter").value.trim().toLowerCase(), reason = byId("reason").value;
  const shown = decisions.filter((one) => (!reason || one.reason === reason) &&
    [one.replica, one.request_id, one.model, one.tenant, one.status].join(" ").toLowerCase().includes(wanted));
  const there = new Set(decisions.map((one) => one.number));
  for (const old of [...decisionRows.keys()]) if (!there.has(old)) decisionRows.delete(old);
  arrange(byId("decisions"), shown.slice(0, SHOWN_DECISIONS).map(decisionRow));
  put(byId("decided"), `${Math.min(shown.length, SHOWN_DECISIONS)} of the last ${decisions.length}, the latest first`);
  const listed = [...byId("reason").options].map((option) => option.value);
  for (const one of new Set(decisions.map((row) => row.reason))) if (!listed.includes(one)) byId("reason").append(new Option(one, one));
}

function drawPrefixes(told) {
  put(byId("sampled"), told.prefixes.length
    ? `What the last ${number(told.requests)} prompts begin with in common. Names are made up by this router: they tell prefixes apart and nothing of what is in them.`
    : `The last ${number(told.requests)} prompts have nothing in common.`);
  byId("prefixes-box").hidden = !told.prefixes.length;
  byId("prefixes").replaceChildren(...told.prefixes.map((one) => words(element("tr"),
    ["Prefix", `${one.prefix} …`, [one.model, one.tenant].filter(Boolean).join(" · ")],
    ["Requests", number(one.requests), percent(one.requests, told.requests), one.requests / told.requests],
    ["Tokens", number(one.tokens)],
    ["Cold prefill", one.prefill_ms === null ? "–" : seconds(one.prefill_ms / 1000)],
    ["Cached on", one.replicas.length ? some(one.replicas) : "nobody"])));
}
