// Requests to this router, with the tab's API key. Paths are relative, so that the page also works below a prefix.

const STORAGE = "baton.key";
let key = read();
let isKeyRefused = () => {};

function read() {
  try {
    return sessionStorage.getItem(STORAGE) || "";
  } catch {
    return "";
  }
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The message is for people: the router's, or that the stream broke off.
export class StreamError extends Error {}

export const hasKey = () => key !== "";

export function setKey(value) {
  key = value;
  try {
    if (value) sessionStorage.setItem(STORAGE, value);
    else sessionStorage.removeItem(STORAGE);
  } catch {
    // storage is turned off: the key is kept until the page is loaded again
  }
}

// `listener` gets the router's message when it refuses to answer without a key, or with this one.
export function onKeyRefused(listener) {
  isKeyRefused = listener;
}

// Returns the response. Throws ApiError with the router's message, or what fetch throws.
export async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  const error = new ApiError(response.status, await message(response));
  if (response.status === 401) isKeyRefused(error.message);
  throw error;
}

export async function getJson(path, signal) {
  return (await request(path, { signal })).json();
}

async function message(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the router answered ${response.status}`;
  }
}

// Calls `refresh` every `pauseMs` while the view is shown and the tab visible, one call at a time.
export class Poll {
  #refresh;
  #pauseMs;
  #timer = 0;
  #isActive = false;
  #isRunning = false;

  constructor(refresh, pauseMs) {
    this.#refresh = refresh;
    this.#pauseMs = pauseMs;
    document.addEventListener("visibilitychange", () => this.now());
  }

  start() {
    this.#isActive = true;
    this.now();
  }

  stop() {
    this.#isActive = false;
    clearTimeout(this.#timer);
  }

  async now() {
    clearTimeout(this.#timer);
    if (!this.#isActive || this.#isRunning || document.visibilityState !== "visible") return;
    this.#isRunning = true;
    let pauseMs = this.#pauseMs;
    try {
      await this.#refresh(AbortSignal.timeout(10000));
    } catch (error) {
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
        this.#isRunning = false;
        return; // until there is another key
      }
      pauseMs *= 3;
    }
    this.#isRunning = false;
    if (this.#isActive) this.#timer = setTimeout(() => this.now(), pauseMs);
  }
}

// --- text: everything that is shown is text ---

export function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Writes only what has changed, so that the browser lays out nothing else again.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function problemOf(error) {
  if (error instanceof ApiError || error instanceof StreamError) return error.message;
  if (error.name === "TimeoutError") return "The router did not answer within 10 s.";
  return "The router cannot be reached.";
}

export const count = (value) => value.toLocaleString("en");
export const ms = (value) => (value === null ? "–" : figure(value));
export const seconds = (value) => (value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${ms(value)} ms`);
export const rate = (value) => (value === null ? "–" : value === 0 ? "0" : figure(value));
const figure = (value) => (value >= 100 ? count(Math.round(value)) : value.toFixed(1));

export function bytes(value) {
  if (value === null) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}
