// Images and audio files that the user pastes, drops or selects.
import { isImage } from "./checks.js";
import { $, el, iconButton } from "./dom.js";
import { on } from "./events.js";
import { abilityOf, chosen, inspect, models } from "./models.js";
import { notice } from "./notices.js";
import { ask } from "./server.js";

const MOST_IMAGES = 16, MOST_BYTES = 2 ** 24;
const attached = []; // data URLs of images

/** Return the attached images, and detach them. */
export function takeImages() {
  const images = attached.splice(0);
  draw();
  return images;
}

export const hasImages = () => attached.length > 0;

function draw() {
  $("attached").replaceChildren(...attached.map((src, place) => el("span", { className: "attachment" },
    el("img", { src, alt: `Image ${place + 1}` }),
    iconButton("close", `Remove image ${place + 1}`, () => { attached.splice(place, 1); draw(); }))));
}

const dataURL = (file) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(file);
});

/** Attach images, and write the text of recordings into the prompt. */
async function add(files) {
  for (const file of files) {
    try {
      if (file.size > MOST_BYTES) throw new Error(`it has ${file.size} bytes, and the maximum is ${MOST_BYTES}`);
      if (file.type.startsWith("image/")) await addImage(file);
      else if (file.type.startsWith("audio/")) await transcribe(file);
      else throw new Error("attach an image or an audio file");
    } catch (error) {
      notice(`${file.name || "The file"} is not attached: ${error.message}.`);
    }
  }
}

async function addImage(file) {
  if (!abilityOf(chosen()).vision) throw new Error(`the model ${chosen()} accepts no images`);
  if (attached.length >= MOST_IMAGES) throw new Error(`a message has at most ${MOST_IMAGES} images`);
  const url = await dataURL(file);
  if (!isImage(url)) throw new Error("the server reads PNG, JPEG, GIF, WebP and BMP");
  attached.push(url);
  draw();
}

/** Return a model of the server that transcribes recordings, the chosen model first. */
async function listener() {
  for (const name of [chosen(), ...models.cards.map((one) => one.id)]) {
    await inspect(name);
    if (abilityOf(name).audio) return name;
  }
  throw new Error("no model of this server transcribes audio");
}

async function transcribe(file) {
  const form = new FormData();
  form.append("model", await listener());
  form.append("file", file, file.name || "recording.wav");
  const area = $("prompt");
  $("attached").append(el("span", { className: "transcribing" }, `Transcribing ${file.name || "the recording"}…`));
  try {
    const { text } = await (await ask("v1/audio/transcriptions", form)).json();
    area.value = [area.value.trim(), text.trim()].filter(Boolean).join(" ");
    area.dispatchEvent(new Event("input"));
  } finally {
    draw();
  }
}

export function buildAttachments() {
  const picker = el("input", { type: "file", accept: "image/*,audio/*", multiple: true, hidden: true, "aria-label": "Images or audio files", onchange: () => { add(picker.files); picker.value = ""; } });
  $("composer").append(picker);
  $("attach").addEventListener("click", () => picker.click());
  $("prompt").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    add([...event.clipboardData.files]);
  });
  const main = document.querySelector("main");
  const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
  main.addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    main.classList.add("dropping");
  });
  main.addEventListener("dragleave", () => main.classList.remove("dropping"));
  main.addEventListener("drop", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    main.classList.remove("dropping");
    add([...event.dataTransfer.files]);
  });
  on("model", () => {
    const hears = models.cards.some((one) => abilityOf(one.id).audio);
    $("attach").hidden = !abilityOf(chosen()).vision && !hears;
  });
}
