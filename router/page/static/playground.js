// Streams a chat, and measures when its tokens come.

import { count, getJson, ms, problemOf, rate, request, seconds, setText, StreamError } from "./api.js";

const byId = (id) => document.getElementById(id);
const BAR_PX = 3;

export class Playground {
  #models = "";
  #abort = null;
  #gaps = []; // milliseconds before each delivery; the first one is the time to the first token
  #frame = 0;

  constructor() {
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("stop").addEventListener("click", () => this.#abort?.abort());
    byId("playground").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("chat-form").requestSubmit();
      if (event.key === "Escape") this.#abort?.abort();
    });
  }

  async show() {
    this.redraw();
    try {
      const { data } = await getJson("v1/models", AbortSignal.timeout(10000));
      this.#setModels(data.map((model) => model.id));
      if (!this.#abort) setText(byId("chat-status"), "");
    } catch (error) {
      setText(byId("chat-status"), problemOf(error));
    }
  }

  hide() {} // a stream goes on while other views are looked at

  #setModels(names) {
    const key = JSON.stringify(names);
    if (key === this.#models) return;
    this.#models = key;
    const before = byId("model").value;
    byId("model").replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(before)) byId("model").value = before;
  }

  async #send() {
    if (this.#abort) return;
    const abort = (this.#abort = new AbortController());
    this.#reset();
    const started = performance.now();
    const stream = { firstAt: 0, lastAt: 0, tokens: 0, finish: "" };
    try {
      const response = await request("v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body()),
        signal: abort.signal,
      });
      this.#link(response.headers.get("x-request-id"));
      for await (const event of events(response.body)) this.#take(event, stream, started);
      setText(byId("chat-status"), `Done${stream.finish ? `: ${stream.finish}` : ""}.`);
    } catch (error) {
      setText(byId("chat-status"), abort.signal.aborted ? "Stopped." : problemOf(error));
    } finally {
      this.#abort = null;
      byId("stop").disabled = true;
      byId("send").disabled = false;
      this.#figures(stream, started);
      byId("gaps").setAttribute("aria-label", this.#description());
    }
  }

  #reset() {
    this.#gaps = [];
    for (const id of ["answer", "reasoning"]) byId(id).replaceChildren(document.createTextNode(""));
    byId("reasoning-box").hidden = true;
    byId("chat-request").hidden = true;
    byId("send").disabled = true;
    byId("stop").disabled = false;
    setText(byId("chat-status"), "Generating…");
    for (const name of ["ttft", "tokens", "rate", "median", "longest"]) setText(byId(`figure-${name}`), "–");
  }

  #link(requestId) {
    if (!requestId) return;
    byId("chat-request").href = `#requests/${encodeURIComponent(requestId)}`;
    byId("chat-request").hidden = false;
  }

  #take(event, stream, started) {
    if (event.error) throw new StreamError(event.error.message);
    if (event.usage) stream.tokens = event.usage.completion_tokens;
    const choice = event.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) stream.finish = choice.finish_reason;
    const text = choice.delta?.content || "";
    const reasoning = choice.delta?.reasoning || "";
    if (!text && !reasoning) return;
    const now = performance.now();
    this.#gaps.push(now - (stream.lastAt || started));
    stream.firstAt ||= now;
    stream.lastAt = now;
    if (reasoning) byId("reasoning-box").hidden = false;
    byId("answer").firstChild.appendData(text);
    byId("reasoning").firstChild.appendData(reasoning);
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#figures(stream, started);
    });
  }

  #figures(stream, started) {
    if (!stream.firstAt) return;
    const tokens = stream.tokens || this.#gaps.length;
    const took = stream.lastAt - stream.firstAt;
    const between = this.#gaps.slice(1).sort((a, b) => a - b);
    setText(byId("figure-ttft"), seconds(stream.firstAt - started));
    setText(byId("figure-tokens"), count(tokens));
    setText(byId("figure-rate"), took > 0 ? rate((1000 * (tokens - 1)) / took) : "–");
    setText(byId("figure-median"), between.length ? `${ms(between[between.length >> 1])} ms` : "–");
    setText(byId("figure-longest"), between.length ? seconds(between[between.length - 1]) : "–");
    this.redraw();
  }

  #description() {
    if (!this.#gaps.length) return "Gaps between tokens: none yet";
    const longest = Math.max(0, ...this.#gaps.slice(1));
    return `Gaps between tokens: ${this.#gaps.length - 1}, the longest ${seconds(longest)}`;
  }

  redraw() {
    const canvas = byId("gaps");
    const width = canvas.clientWidth;
    if (!width) return; // not shown
    const scale = devicePixelRatio || 1;
    const height = canvas.clientHeight;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const style = getComputedStyle(canvas);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const gaps = this.#gaps.slice(-Math.floor(width / BAR_PX));
    const isFirst = gaps.length === this.#gaps.length;
    const highest = Math.max(1, ...gaps);
    gaps.forEach((gap, index) => {
      const bar = Math.max(1, (gap / highest) * height);
      pen.fillStyle = style.getPropertyValue(isFirst && index === 0 ? "--accent" : "--bar");
      pen.fillRect(index * BAR_PX, height - bar, BAR_PX - 1, bar);
    });
  }
}

function body() {
  const system = byId("system").value;
  const messages = [{ role: "user", content: byId("user").value }];
  if (system.trim()) messages.unshift({ role: "system", content: system });
  return {
    model: byId("model").value,
    messages,
    temperature: Number(byId("temperature").value),
    max_tokens: Number(byId("max-tokens").value),
    stream: true,
    stream_options: { include_usage: true },
  };
}

// The data of a stream's events, parsed; ends with [DONE].
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new StreamError("The stream broke off.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
