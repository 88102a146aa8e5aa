// What is wrong now, and the figures of this router's traffic.
const OF_LIMITS = /^(tenant|hold)_/; // codes of errors that are a 429: somebody's limit, or a full queue
const SLOW = 2; // times the fleet's median prefill time: the alert WarmrouteSlowReplica

/** [how bad, text, the alert whose runbook says what to do] of everything that wants somebody's eyes. */
function problems(fleet) {
  const found = [], named = (wanted) => fleet.replicas.filter(wanted).map((r) => r.name);
  const tell = (look, names, text, alert = "") => { if (names.length) found.push([look, `${some(names)} ${text(names.length > 1)}`, alert]); };
  if (!fleet.replicas.some((r) => r.usable)) found.push(["bad", fleet.replicas.length ? "no replica may take work" : "there are no replicas", "WarmrouteNoUsableReplica"]);
  tell("bad", named((r) => healthOf(r)[1] === "ejected"), (many) => `${many ? "are" : "is"} ejected: probes or requests fail there`, "WarmrouteReplicaEjected");
  tell("watch", named((r) => ["suspect", "probation"].includes(healthOf(r)[1])), (many) => `${many ? "are" : "is"} watched: failed lately, or just came back`);
  tell("watch", named((r) => healthOf(r)[1] === "draining"), (many) => `${many ? "are" : "is"} drained by an operator`);
  tell("bad", named((r) => r.cache.alert), (many) => `${many ? "have" : "has"} less than half cached of what is believed`, "WarmrouteCacheCreditLow");
  const usual = median(fleet.replicas.filter((r) => r.usable).map((r) => r.calibration.prefill_factor));
  if (fleet.replicas.length > 2) tell("watch", named((r) => r.usable && r.calibration.prefill_factor > SLOW * usual), (many) => `${many ? "prefill" : "prefills"} at less than half of the others' speed`, "WarmrouteSlowReplica");
  for (const source of fleet.discovery) if (source.failure !== null) found.push(["bad", `replicas from ${source.source} are not heard of`, "WarmrouteDiscoveryFails"]);
  if (fleet.state.kind !== "memory" && fleet.state.state !== "sharing") found.push(["bad", `this router decides without the others: ${fleet.state.state}`, "WarmrouteNotSharing"]);
  const errors = Object.entries(changes(fleet.traffic.errors, before().traffic.errors));
  const turned = Object.fromEntries(errors.filter(([code]) => OF_LIMITS.test(code))), others = Object.fromEntries(errors.filter(([code]) => !OF_LIMITS.test(code)));
  if (sum(Object.values(turned))) found.push(["watch", `turned away in the last minute: ${pairs(turned)}`, "WarmrouteTurnedAway"]);
  if (sum(Object.values(others))) found.push(["watch", `errors of this router in the last minute: ${pairs(others)}`, "WarmrouteErrors"]);
  const broken = fleet.traffic.broken_streams - before().traffic.broken_streams;
  if (broken > 0) found.push(["watch", `${number(broken)} answers broke after their first byte in the last minute`, "WarmrouteBrokenStreams"]);
  return found;
}

function drawAttention(fleet) {
  const found = problems(fleet), list = byId("attention");
  const texts = found.map(([look, text, alert]) => `${look === "bad" ? "✕" : "▲"} ${text}${alert ? ` ${alert}` : ""}`);
  if (!texts.length) texts.push("● Nothing needs attention");
  if ([...list.children].map((one) => one.textContent).join("\n") === texts.join("\n")) return;
  list.replaceChildren(...(found.length ? found.map(([look, text, alert]) => {
    const item = element("li", `${look === "bad" ? "✕" : "▲"} ${text}`, look);
    if (alert) item.append(element("small", ` ${alert}`));
    return item;
  }) : [element("li", texts[0], "good")]));
}

function drawTraffic(fleet) {
  const now = fleet.traffic, old = before().traffic, known = history.length > 1;
  const counts = now.ttft.counts.map((count, bucket) => count - old.ttft.counts[bucket]);
  const at = (share) => quantile(now.ttft.bounds_s, counts, share);
  const decided = sum(Object.values(now.decisions)), decidedLately = decided - sum(Object.values(old.decisions));
  const spilled = fleet.spills - before().spills, [cached, prompt, when] = hits(now, old);
  const rate = known ? (now.requests - old.requests) / elapsed() : null;
  show("rate", "Requests/s", number(rate, 1), `${number(now.requests)} since start`, rate);
  show("flight", "In flight", number(now.in_flight), `${number(fleet.held)} held in routers`, now.in_flight);
  show("ttft50", "TTFT p50", seconds(at(0.5)), `${number(sum(counts))} streams in the last minute`, at(0.5));
  show("ttft90", "TTFT p90", seconds(at(0.9)), "", at(0.9));
  show("ttft99", "TTFT p99", seconds(at(0.99)), "", at(0.99));
  show("hits", "Hit share", percent(cached, prompt), `${when}; ${tokens(now.cached_tokens)} of ${tokens(now.prompt_tokens)} prompt tokens since start`, prompt ? cached / prompt : null);
  show("spills", "Spill rate", decidedLately ? percent(spilled, decidedLately) : "–", `of the last minute's decisions; ${number(fleet.spills)} since start`, decidedLately ? spilled / decidedLately : null);
  show("saved", "Prefill saved", seconds(fleet.saved_prefill_s), "since start, as predicted", fleet.saved_prefill_s - before().saved_prefill_s);
  show("reasons", "Decisions", number(decided), pairs(now.decisions));
  show("retries", "Retries", number(now.retries), `${number(now.broken_streams)} streams broken`);
  show("errors", "Errors of the router", number(sum(Object.values(now.errors))), pairs(now.errors));
  show("left", "Clients that left", number(now.client_disconnects));
}

/** Where replicas come from, beside the config's own list. */
function drawSources(sources) {
  byId("sources").replaceChildren(...sources.map((one) => one.failure === null
    ? element("li", `● ${one.source}: ${number(one.replicas)} replicas`)
    : element("li", `✕ ${one.source} fails, what it found before stays (${number(one.replicas)} replicas): ${one.failure}`, "bad")));
}

function drawRouters(state) {
  const alone = state.kind === "memory";
  put(byId("sharing"), alone ? "One router: state is kept in memory and shared with nobody."
    : `${state.state === "sharing" ? "●" : "▲"} ${state.state} for ${number(state.since_s)} s as ${state.router}; ` +
      `${number(state.peers.length)} other routers heard` + (state.lag_ms === null ? "" : `, news takes ${number(state.lag_ms, 1)} ms`) +
      (state.fault ? `. Fault: ${state.fault}` : ""));
  byId("sharing").className = alone || state.state === "sharing" ? "" : "bad";
  byId("peers-box").hidden = !state.peers.length;
  byId("peers").replaceChildren(...state.peers.map((peer) => {
    const row = element("tr");
    cell(row, "Router", peer.router);
    cell(row, "Heard", `${number(peer.heard_s_ago, 1)} s ago`);
    cell(row, "Outstanding", number(peer.outstanding));
    cell(row, "Gaps made good", number(peer.gaps));
    return row;
  }));
}
