// Asks the router once a second, and prices what is typed in.
const PERIOD_MS = 1000;
const PREFIXES_EVERY = 5;
let key = null;
let paused = false;
let last = null;
let looks = 0;

function draw(fleet) {
  last = fleet;
  remember(fleet);
  put(byId("config"), `config ${fleet.config.hash}, version ${fleet.config.version}`);
  drawAttention(fleet);
  drawTraffic(fleet);
  drawReplicas(fleet.replicas);
  drawSources(fleet.discovery);
  drawTenants(fleet.tenants || []);
  drawRouters(fleet.state);
}

// ---- asking the router --------------------------------------------------------------------------------------
/** Resolves when a key was entered. The dialog is there once, whoever asks. */
let asking = null;
function askKey(problem) {
  asking ??= new Promise((entered) => {
    put(byId("key-problem"), problem);
    byId("ask").showModal();
    byId("key").focus();
    byId("key-form").addEventListener("submit", () => {
      key = byId("key").value;
      byId("key").value = "";
      asking = null;
      entered();
    }, {once: true});
  });
  return asking;
}
byId("ask").addEventListener("cancel", (event) => event.preventDefault());

async function ask(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = {...options.headers, ...(used === null ? {} : {authorization: `Bearer ${used}`})};
    const answer = await fetch(path, {...options, headers, cache: "no-store", credentials: "omit"});
    const told = await answer.json();
    if (answer.status !== 401 && answer.status !== 403) {
      if (!answer.ok) throw new Error(told.error ? told.error.message : `status ${answer.status}`);
      return told;
    }
    if (used === key) await askKey(used === null ? "" : told.error.message);
  }
}

async function follow() {
  if (!paused) {
    try {
      const fleet = await ask("fleet");
      put(byId("link"), "● live");
      byId("link").className = "good";
      draw(fleet);
      ({decisions} = await ask("decisions"));
      drawDecisions();
      if (looks++ % PREFIXES_EVERY === 0) drawPrefixes(await ask("prefixes"));
    } catch (error) {
      put(byId("link"), `✕ no answer: ${error.message}; figures are old`);
      byId("link").className = "bad";
    }
  }
  setTimeout(follow, PERIOD_MS);
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (paused) { put(byId("link"), "‖ paused"); byId("link").className = "watch"; }
});
for (const id of ["filter", "wellness"]) byId(id).addEventListener("input", () => { if (last) drawReplicas(last.replicas); });
for (const id of ["decision-filter", "reason"]) byId(id).addEventListener("input", drawDecisions);
byId("tenant-filter").addEventListener("input", () => { if (last) drawTenants(last.tenants); });

byId("explain").addEventListener("submit", async (event) => {
  event.preventDefault();
  const headers = {"content-type": "application/json"};
  if (byId("session").value) headers["x-session-id"] = byId("session").value;
  const verdict = byId("verdict");
  byId("candidates-box").hidden = true;
  put(byId("prices"), "");
  try {
    drawExplanation(await ask("explain", {method: "POST", headers, body: byId("body").value}));
  } catch (error) {
    verdict.className = "bad";
    put(verdict, error.message);
  }
});

function drawExplanation(told) {
  byId("verdict").className = "";
  put(byId("verdict"), `${told.prompt_tokens} prompt tokens → ${told.replica} (${told.reason}): ${told.matched_tokens} matched, saves ${number(told.saved_ms, 1)} ms of prefill`);
  byId("candidates").replaceChildren(...[...told.candidates].sort((a, b) => a.total_ms - b.total_ms).map((one) => {
    const row = element("tr"), chosen = one.replica === told.replica;
    row.className = chosen ? "chosen" : "";
    cell(row, "Candidate", (chosen ? "➤ " : "") + one.replica, chosen ? "chosen" : "");
    cell(row, "Matched tokens", number(one.matched_tokens));
    cell(row, "Queued / decoding / held", `${one.queued} / ${one.decoding} / ${one.held}`);
    cell(row, "Wait ms", number(one.wait_ms, 1));
    cell(row, "+ prefill ms", number(one.prefill_ms, 1));
    cell(row, "+ imposed ms", number(one.imposed_ms, 1));
    cell(row, "= total ms", number(one.total_ms, 1));
    return row;
  }));
  byId("candidates-box").hidden = false;
  const best = told.best_other;
  put(byId("prices"), (best ? `Against ${best.replica}: ${number(best.saved_ms, 1)} ms less prefill for ${number(best.extra_wait_ms, 1)} ms more queue, ${number(best.total_more_ms, 1)} ms less in total. ` : "") +
    `Prices: ${told.prices.arrivals_per_replica_s} arrivals/s a replica, fleet utilization ${told.prices.fleet_utilization}, ` +
    `decode price ${told.prices.decode_price}, ${told.prices.expected_output_tokens} expected reply tokens, copy price ${told.prices.copy_price}.`);
}

drawColumns();
follow();
