// Requests to the server: JSON answers, streams of events, and errors.
import { access, askForKey } from "./key.js";

/** An error that the server answered. */
export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered with status ${status}`);
    this.status = status;
    this.code = error?.code ?? null;
  }
}

/** Send JSON, a form, or a request without a body. Raise `Refused` for an error of the server. */
export async function ask(path, body, signal) {
  const headers = {};
  const form = body instanceof FormData;
  if (access.key) headers.Authorization = `Bearer ${access.key}`;
  if (body !== undefined && !form) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST", headers, signal,
    body: body === undefined || form ? body : JSON.stringify(body),
  });
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    if (answer.status === 401) askForKey(access.key ? said.error?.message : "");
    throw new Refused(answer.status, said.error);
  }
  return answer;
}

/** Yield the chunks of a stream as objects. Raise an error if the stream has no end. */
export async function* streamed(path, body, signal) {
  const answer = await ask(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new TypeError("The connection ended before the answer was complete.");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(0, chunk.error);
      yield chunk;
    }
  }
}
