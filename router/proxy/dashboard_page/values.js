// Plain values: numbers to texts, and what a minute's difference of counters says.
const sum = (values) => values.reduce((total, value) => total + value, 0);
const number = (value, digits = 0) => value === null || value === undefined || !Number.isFinite(value) ? "–"
  : value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
const percent = (part, whole) => whole > 0 ? `${(100 * part / whole).toFixed(1)}%` : "–";
const seconds = (value) => value === null ? "–" : value < 1 ? `${number(1000 * value)} ms` : `${number(value, 2)} s`;
const tokens = (value) => value >= 1e6 ? `${number(value / 1e6, 2)} M` : value >= 1e4 ? `${number(value / 1e3)} k` : number(value);
const pairs = (counts) => Object.entries(counts).sort((a, b) => b[1] - a[1]).map(([name, count]) => `${name} ${number(count)}`).join(", ");
const some = (names, most = 4) => names.length <= most ? names.join(", ") : `${names.slice(0, most).join(", ")} and ${names.length - most} more`;
const changes = (now, old) => Object.fromEntries(Object.entries(now).map(([name, count]) => [name, count - (old[name] || 0)]).filter(([, more]) => more > 0));

/** The `share` quantile of bucket counts, linear within a bucket; null without counts. */
function quantile(bounds, counts, share) {
  const wanted = share * sum(counts);
  if (!wanted) return null;
  let below = 0;
  for (let bucket = 0; bucket < counts.length; bucket++) {
    if (below + counts[bucket] >= wanted && counts[bucket]) {
      if (bucket >= bounds.length) return bounds[bounds.length - 1];
      const low = bucket ? bounds[bucket - 1] : 0;
      return low + (bounds[bucket] - low) * (wanted - below) / counts[bucket];
    }
    below += counts[bucket];
  }
  return null;
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : null;
}

/** What health means at a glance: a sign and a word, colour only besides. */
function healthOf(replica) {
  if (replica.leaving) return ["⇥", "leaving", "watch"];
  if (replica.draining) return ["‖", "draining", "watch"];
  return {healthy: ["●", "healthy", "good"], suspect: ["▲", "suspect", "watch"], probation: ["◐", "probation", "watch"],
    ejected: ["✕", "ejected", "bad"]}[replica.health] || ["?", replica.health, "faint"];
}

// ---- the last minute ----------------------------------------------------------------------------------------
const WINDOW_S = 60;
const TREND_POINTS = 120;
const history = [];
const trends = new Map();

/** Keep what a minute's difference needs; a router that started anew begins anew. */
function remember(fleet) {
  const now = performance.now() / 1000, last = history[history.length - 1];
  if (last && fleet.traffic.requests < last.fleet.traffic.requests) { history.length = 0; trends.clear(); }
  history.push({now, fleet});
  while (history.length > 2 && history[0].now < now - WINDOW_S) history.shift();
}

const before = () => history[0].fleet;
const elapsed = () => Math.max(1e-9, history[history.length - 1].now - history[0].now);
const replicaBefore = (name) => before().replicas.find((one) => one.name === name) || null;

/** One more point of the line called `name`; its points. */
function trend(name, value) {
  const points = trends.get(name) || [];
  points.push(value);
  if (points.length > TREND_POINTS) points.shift();
  trends.set(name, points);
  return points;
}

/** Hit share, recent if anything was reported in the last minute, else since start. */
function hits(now, old) {
  const recent = old ? now.prompt_tokens - old.prompt_tokens : 0;
  if (recent > 0) return [now.cached_tokens - old.cached_tokens, recent, "last minute"];
  if (now.prompt_tokens > 0) return [now.cached_tokens, now.prompt_tokens, "since start"];
  return [0, 0, "none reported"];
}
