// Elements, icons and announcements. Text is never parsed as HTML.

export const $ = (id) => document.getElementById(id);

/** Return an element with properties, listeners (`onclick`, ...) and children. */
export function el(tag, props = {}, ...kids) {
  return filled(document.createElement(tag), props, kids);
}

/** Return an element of the Scalable Vector Graphics namespace. */
export function svg(tag, props = {}, ...kids) {
  return named("http://www.w3.org/2000/svg", tag, props, kids);
}

/** Return an element of the MathML namespace. */
export function math(tag, props = {}, ...kids) {
  return named("http://www.w3.org/1998/Math/MathML", tag, props, kids);
}

export const icon = (name) => svg("svg", { "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));

export function iconButton(name, label, onclick, more = {}) {
  return el("button", { type: "button", className: "icon", title: label, "aria-label": label, onclick, ...more }, icon(name));
}

export function textButton(label, onclick, more = {}) {
  return el("button", { type: "button", className: "text", onclick, ...more }, label);
}

/** Announce a text to screen readers. */
export function speak(text) {
  $("spoken").textContent = text;
}

function filled(node, props, kids) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node) node[name] = value;
    else if (value !== false) node.setAttribute(name, value);
  }
  node.append(...present(kids));
  return node;
}

function named(namespace, tag, props, kids) {
  const node = document.createElementNS(namespace, tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  node.append(...present(kids));
  return node;
}

const present = (kids) => kids.flat().filter((kid) => kid !== null && kid !== undefined && kid !== false);
