// The banner while the server does not answer, and a new attempt after a growing delay.
import { $ } from "./dom.js";
import { emit } from "./events.js";

const EVERY = 1000, LONGEST = 15000; // milliseconds between two attempts
const state = { failures: 0, timer: 0, next: 0, attempt: null };

/** Call `attempt` regularly. An attempt that raises an error shows the banner. */
export function watchConnection(attempt) {
  state.attempt = attempt;
  $("reconnect-now").addEventListener("click", run);
  document.addEventListener("visibilitychange", () => document.hidden || run());
  setInterval(count, 500);
  run();
}

async function run() {
  clearTimeout(state.timer);
  if (!document.hidden) {
    try {
      await state.attempt();
      if (state.failures) emit("reconnected");
      state.failures = 0;
    } catch {
      state.failures += 1;
    }
  }
  // One failure can be a restart of the network: the banner appears after the second.
  $("banner").hidden = state.failures < 2;
  const delay = Math.min(LONGEST, EVERY * 2 ** Math.max(0, state.failures - 2));
  state.next = Date.now() + delay;
  clearTimeout(state.timer);
  state.timer = setTimeout(run, delay);
  count();
}

function count() {
  if ($("banner").hidden) return;
  const seconds = Math.max(0, Math.ceil((state.next - Date.now()) / 1000));
  $("banner-text").textContent = `The server does not answer. Next attempt in ${seconds} s.`;
}
