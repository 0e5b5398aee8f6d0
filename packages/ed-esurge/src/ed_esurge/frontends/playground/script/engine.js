// The engine's statistics, read from the Prometheus metrics of the server while the page is visible.
import { watchConnection } from "./connection.js";
import { $, el, svg } from "./dom.js";
import { cardOf, chosen } from "./models.js";

const KEPT = 60; // seconds of history in the curves
const TILES = {};
let before = null, showing = null;

function tile(id, label, big = false, curve = true) {
  const value = el("div", { className: "value" }, "–");
  const aside = el("span", { className: "aside" });
  const node = el("div", { className: `tile${big ? " big" : ""}`, id: `tile-${id}` }, el("div", { className: "label" }, label, aside), value);
  const one = { value, aside, points: [] };
  if (curve) {
    one.area = svg("path", { class: "area" });
    one.line = svg("path", { class: "line" });
    node.append(svg("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" }, one.area, one.line));
  } else {
    one.bar = el("i");
    node.append(el("div", { className: "meter", "aria-hidden": "true" }, one.bar));
  }
  TILES[id] = one;
  return node;
}

export function buildEngine() {
  $("tiles").append(
    tile("speed", "Tokens per second", true),
    el("div", { className: "pair" }, tile("running", "Running"), tile("waiting", "Waiting")),
    tile("cache", "Key/value cache in use", false, false),
    tile("prefix", "Cached prompt tokens", false, false),
    tile("first", "Time to the first token"),
    tile("done", "Completed requests", false),
  );
  watchConnection(poll);
}

/** Return the values of one model: name -> sum over the other labels, or the mean for fractions. */
function numbersOf(text, model) {
  const sums = {}, counts = {};
  for (const line of text.split("\n")) {
    const found = line.match(/^([\w:]+)\{([^}]*)\} (\S+)$/);
    if (!found || !found[2].includes(`model_name=${JSON.stringify(model)}`)) continue;
    sums[found[1]] = (sums[found[1]] ?? 0) + +found[3];
    counts[found[1]] = (counts[found[1]] ?? 0) + 1;
  }
  for (const name in sums) if (name.endsWith("_perc")) sums[name] /= counts[name];
  return sums;
}

/** Read the statistics once. Raise an error if the server does not answer. */
async function poll() {
  let text, ready;
  try {
    [text, ready] = await Promise.all([fetch("metrics").then((answer) => answer.text()), fetch("health")]);
  } catch (error) {
    before = null;
    state("down");
    throw error;
  }
  const card = cardOf(chosen());
  const model = card ? card.parent ?? card.root : firstModel(text);
  if (model !== showing) {
    showing = model;
    before = null;
    for (const one of Object.values(TILES)) one.points = [];
  }
  state(ready.ok ? "ready" : ready.status === 503 ? "down" : "unknown");
  update(numbersOf(text, model));
}

const firstModel = (text) => text.match(/model_name="((?:[^"\\]|\\.)*)"/)?.[1] ?? "";

function state(name) {
  const texts = { ready: "ready", down: "not answering", unknown: "unknown" };
  if ($("state").dataset.state === name) return;
  $("state").dataset.state = name;
  $("state").textContent = texts[name];
}

function update(now) {
  const seconds = performance.now() / 1000;
  const grew = (name) => (before ? now[name] - before.numbers[name] : 0) || 0;
  const passed = before ? seconds - before.seconds : 1;
  const speed = grew("vllm:generation_tokens_total") / passed;
  show1("speed", speed, speed.toFixed(speed < 10 ? 1 : 0), "tokens/s");
  TILES.speed.aside.textContent = `maximum ${Math.max(...TILES.speed.points).toFixed(0)}`;
  show1("running", now["vllm:num_requests_running"], String(now["vllm:num_requests_running"] ?? "–"));
  show1("waiting", now["vllm:num_requests_waiting"], String(now["vllm:num_requests_waiting"] ?? "–"));
  share("cache", now["vllm:kv_cache_usage_perc"]);
  const asked = now["vllm:prefix_cache_queries_total"];
  share("prefix", asked ? now["vllm:prefix_cache_hits_total"] / asked : asked);
  if (asked !== undefined) TILES.prefix.aside.textContent = `of ${compact(asked)}`;
  const count = grew("vllm:time_to_first_token_seconds_count");
  const first = TILES.first;
  first.last = count ? (grew("vllm:time_to_first_token_seconds_sum") / count) * 1000 : first.last;
  const [time, unit] = first.last === undefined ? ["–", ""] : first.last < 1e4 ? [first.last.toFixed(0), "ms"] : [(first.last / 1000).toFixed(1), "s"];
  show1("first", first.last ?? 0, time, unit);
  const done = now["vllm:request_success_total"] ?? 0;
  show1("done", grew("vllm:request_success_total"), compact(done));
  const lost = now["vllm:num_preemptions_total"];
  TILES.done.aside.textContent = lost ? `${compact(lost)} preempted` : "";
  before = { numbers: now, seconds };
}

const compact = (value) => Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(value);

function show1(id, value, text, unit = "") {
  const one = TILES[id];
  one.value.replaceChildren(text, ...(unit ? [el("small", {}, unit)] : []));
  one.points.push(value ?? 0);
  if (one.points.length > KEPT) one.points.shift();
  const most = Math.max(...one.points, 1e-9);
  const at = (point, place) => `${(100 * (KEPT - one.points.length + place)) / (KEPT - 1)} ${29 - (27 * point) / most}`;
  const line = "M" + one.points.map(at).join("L");
  const begin = (100 * (KEPT - one.points.length)) / (KEPT - 1);
  one.line.setAttribute("d", line);
  one.area.setAttribute("d", `${line}L100 30L${begin} 30Z`);
}

function share(id, value) {
  const one = TILES[id];
  const known = value !== undefined && Number.isFinite(value);
  one.value.replaceChildren(known ? (value * 100).toFixed(value < 0.1 ? 1 : 0) : "–", ...(known ? [el("small", {}, "%")] : []));
  one.bar.style.width = known ? `${Math.min(100, value * 100)}%` : "0";
}
