// The request that continues a branch of the conversation.
import { access } from "./key.js";
import { chats, chosen, mostTokens } from "./models.js";
import { parsed, settings } from "./settings.js";
import { path } from "./tree.js";

const ALWAYS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"];

/** Return the nodes that later answers read: failed and empty answers, and their questions, are left out. */
export function context(nodes) {
  const absent = (node) => node.role === "assistant" && (node.error || !(node.text || node.calls?.length));
  const kept = nodes.filter((node) => !absent(node));
  return kept.filter((node, place) => !(node.role === "user" && kept[place + 1]?.role === "user"));
}

function contentOf(node) {
  if (!node.images?.length) return node.text;
  const images = node.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return node.text ? [...images, { type: "text", text: node.text }] : images;
}

/** Return a branch as messages of a chat request. */
function messagesOf(nodes, values) {
  const messages = [];
  if (values.system.trim()) messages.push({ role: "system", content: values.system });
  for (const node of nodes) {
    const message = { role: node.role, content: contentOf(node) };
    if (node.calls?.length) {
      message.tool_calls = node.calls.map((call) => ({
        id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
      }));
      message.content = node.text || null;
    }
    if (node.role === "tool") message.tool_call_id = node.call;
    messages.push(message);
  }
  return messages;
}

/** Return the path and the body of a request. `from`: the answer to continue, or undefined. */
export function requestFor(branch, from, { model, values } = { model: chosen(), values: settings }) {
  const nodes = context(branch);
  const body = { model: model || undefined, stream: true, stream_options: { include_usage: true } };
  for (const name of ALWAYS) body[name] = values[name];
  if (+values.top_k > 0) body.top_k = +values.top_k;
  body.max_tokens = values.max_tokens === "" ? mostTokens(model) : +values.max_tokens;
  if (values.seed !== "") body.seed = +values.seed;
  const stops = values.stop.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  if (!from && +values.n > 1) body.n = +values.n;
  const schema = values.form === "json_schema" ? parsed("schema", values) : null;
  if (values.form === "regex" && values.schema) body.guided_regex = values.schema;
  if (values.form === "grammar" && values.schema.trim()) body.guided_grammar = values.schema;
  if (!chats(values, model)) {
    if (values.logprobs) body.logprobs = +values.top;
    if (schema) body.guided_json = schema;
    if (values.form === "json_object") body.guided_json = { type: "object" };
    body.prompt = nodes.map((node) => node.text).join("") + (from?.text ?? "");
    return ["v1/completions", body];
  }
  if (values.logprobs) Object.assign(body, { logprobs: true, top_logprobs: +values.top });
  const tools = parsed("tools", values);
  if (tools) Object.assign(body, { tools, tool_choice: values.choice });
  if (values.form === "json_object") body.response_format = { type: "json_object" };
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  body.messages = messagesOf(from ? [...nodes, { role: "assistant", text: from.text }] : nodes, values);
  if (from) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return ["v1/chat/completions", body];
}

/** Return the request for another answer as a command for curl. */
export function curl() {
  const nodes = path();
  while (nodes.at(-1)?.role === "assistant") nodes.pop();
  const [place, body] = requestFor(nodes);
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = access.key ? ' \\\n  -H "Authorization: Bearer $ESURGE_API_KEY"' : "";
  return `curl ${new URL(place, location.href)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'`;
}
