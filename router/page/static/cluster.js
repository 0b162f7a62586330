// The cluster live. Each answer of /v1/cluster is drawn in one frame: rows are kept, and only cells that changed are
// written.

import { bytes, count, element, getJson, Poll, problemOf, rate, setText } from "./api.js";

const byId = (id) => document.getElementById(id);
const MAX_EVENTS = 100;
const COLUMNS = ["pod", "role", "address", "state", "running", "waiting", "kv", "use", "prompt", "output", "hits", "drafts", "cut"];
const NUMBERS = new Set(["running", "waiting", "kv", "prompt", "output", "hits"]);

export class ClusterView {
  #poll = new Poll((signal) => this.#refresh(signal), 1000);
  #before = null; // the last answer
  #rows = new Map(); // role and address -> PodRow
  #pairs = new Map(); // prefill and decode address -> list item
  #frame = 0;

  constructor() {
    byId("pod-filter").addEventListener("change", () => this.#filter());
  }

  show() {
    this.#poll.start();
  }

  hide() {
    this.#poll.stop();
  }

  async #refresh(signal) {
    let view;
    try {
      view = await getJson("v1/cluster", signal);
    } catch (error) {
      setText(byId("cluster-status"), problemOf(error));
      throw error;
    }
    cancelAnimationFrame(this.#frame);
    this.#frame = requestAnimationFrame(() => this.#draw(view));
  }

  #draw(view) {
    setText(byId("cluster-status"), "");
    const before = new Map((this.#before?.pods ?? []).map((pod) => [keyOf(pod), pod]));
    const passed = this.#before && view.at_s > this.#before.at_s ? view.at_s - this.#before.at_s : 0;
    const rates = view.pods.map((pod) => ratesOf(pod, before.get(keyOf(pod)), passed));
    if (this.#before) this.#note(view.pods, before);
    this.#before = view;
    this.#totals(view, rates);
    this.#models(view.models);
    this.#pods(view.pods, rates);
    this.#ranks(view.pods);
    this.#handoffs(view);
  }

  #totals(view, rates) {
    const ready = view.pods.filter((pod) => pod.state === "ready").length;
    setText(byId("total-ready"), `${ready} of ${view.pods.length}`);
    setText(byId("total-requests"), count(view.num_under_way));
    setText(byId("total-queued"), count(sum(view.models.map((model) => model.num_queued))));
    setText(byId("total-prompt"), rate(sum(rates.map((each) => each.prompt))));
    setText(byId("total-output"), rate(sum(rates.map((each) => each.output))));
    setText(byId("total-kv"), bytes(sum(rates.map((each) => each.kv))));
  }

  #models(models) {
    showLines("cluster-models", models.map((model) => {
      const adapters = model.adapters.length ? `, adapters ${model.adapters.join(", ")}` : "";
      return `${model.name}: ${model.reason || "served"}, ${model.num_queued} queued${adapters}`;
    }));
  }

  #ranks(pods) {
    const lines = pods.flatMap((pod) => (pod.load?.ranks ?? []).map((rank) => `${nameOf(pod)} ${engineOf(pod, rank)}${rankLine(rank)}`));
    byId("ranks-part").hidden = lines.length === 0;
    showLines("ranks", lines);
  }

  #pods(pods, rates) {
    const gone = new Set(this.#rows.keys());
    pods.forEach((pod, index) => {
      const key = keyOf(pod);
      gone.delete(key);
      let row = this.#rows.get(key);
      if (!row) {
        row = new PodRow(pod);
        this.#rows.set(key, row);
        byId("pods").append(row.node);
      }
      row.update(pod, rates[index]);
    });
    for (const key of gone) {
      this.#rows.get(key).node.remove();
      this.#rows.delete(key);
    }
    this.#filter();
  }

  #filter() {
    const wanted = byId("pod-filter").value;
    for (const row of this.#rows.values()) row.setShown(wanted);
  }

  #handoffs(view) {
    const names = new Map(view.pods.map((pod) => [pod.address, nameOf(pod)]));
    const gone = new Set(this.#pairs.keys());
    const most = Math.max(1, ...view.handoffs.map((each) => each.num_running + each.num_ended));
    for (const each of view.handoffs) {
      const key = `${each.prefill} ${each.decode}`;
      gone.delete(key);
      let item = this.#pairs.get(key);
      if (!item) {
        item = element("li", "", "handoff");
        item.append(element("span"), element("span", "", "wire"), element("span"), element("span", "", "hint"));
        item.children[1].setAttribute("aria-hidden", "true");
        this.#pairs.set(key, item);
        byId("handoffs").append(item);
      }
      const [prefill, wire, decode, text] = item.children;
      setText(prefill, names.get(each.prefill) ?? each.prefill);
      setText(decode, names.get(each.decode) ?? each.decode);
      setText(text, `${each.num_running} now, ${each.num_ended} ended`);
      wire.classList.toggle("flows", each.num_running > 0);
      wire.style.setProperty("--share", String((each.num_running + each.num_ended) / most));
    }
    for (const key of gone) {
      this.#pairs.get(key).remove();
      this.#pairs.delete(key);
    }
  }

  #note(pods, before) {
    const known = new Set();
    for (const pod of pods) {
      known.add(keyOf(pod));
      const old = before.get(keyOf(pod));
      if (!old) note(`${nameOf(pod)} at ${pod.address} has joined`);
      else if (old.state !== pod.state) {
        note(`${nameOf(pod)} at ${pod.address}: ${old.state} → ${pod.state}${pod.detail ? `: ${pod.detail}` : ""}`);
      }
    }
    for (const [key, pod] of before) if (!known.has(key)) note(`${nameOf(pod)} at ${pod.address} has left`);
  }
}

class PodRow {
  #cells = {};
  #share = -1;
  #bar = element("span", "", "meter");
  #usage = element("span");
  #state = element("span", "", "state");
  #detail = element("span", "", "detail");

  constructor(pod) {
    this.node = element("tr");
    for (const column of COLUMNS) {
      const cell = element(column === "pod" ? "th" : "td", "", NUMBERS.has(column) ? "number" : column);
      if (column === "pod") cell.scope = "row";
      this.#cells[column] = cell;
      this.node.append(cell);
    }
    this.#bar.setAttribute("aria-hidden", "true");
    this.#cells.use.append(this.#bar, this.#usage);
    this.#cells.state.append(this.#state, this.#detail);
    this.node.dataset.role = pod.role;
    setText(this.#cells.role, pod.role);
    setText(this.#cells.address, pod.address);
  }

  update(pod, rates) {
    const load = pod.load;
    if (this.#state.dataset.state !== pod.state) this.#state.dataset.state = pod.state;
    setText(this.#state, pod.state.replace("_", " "));
    setText(this.#detail, pod.detail);
    this.#write("pod", nameOf(pod));
    this.#write("running", load ? count(load.num_running) : "–");
    this.#write("waiting", load ? count(load.num_waiting) : "–");
    this.#write("kv", load ? count(load.num_waiting_for_remote_kv) : "–");
    this.#write("cut", cutOf(pod) || "–");
    this.#write("prompt", rate(rates.prompt));
    this.#write("output", rate(rates.output));
    const hits = load?.prefix_cache_queries ? load.prefix_cache_hits / load.prefix_cache_queries : null;
    this.#write("hits", hits === null ? "–" : `${Math.round(100 * hits)} %`);
    this.#write("drafts", draftsOf(pod));
    const share = load?.num_blocks ? 1 - load.num_free_blocks / load.num_blocks : 0;
    const percent = Math.round(100 * share);
    setText(this.#usage, load ? `${percent} %` : "–");
    if (percent !== this.#share) {
      this.#share = percent;
      this.#bar.style.setProperty("--share", String(share));
    }
  }

  setShown(wanted) {
    const isTrouble = this.#state.dataset.state !== "ready";
    const isHidden = wanted === "trouble" ? !isTrouble : wanted !== "" && this.node.dataset.role !== wanted;
    if (this.node.hidden !== isHidden) this.node.hidden = isHidden;
  }

  #write(column, text) {
    setText(this.#cells[column], text);
  }
}

const keyOf = (pod) => `${pod.role} ${pod.address}`;
const nameOf = (pod) => pod.pod_id || pod.address;
const LETTERS = { tensor_parallel_size: "TP", pipeline_parallel_size: "PP", data_parallel_size: "DP" };
const cutOf = (pod) =>
  Object.entries(pod.parallel_sizes)
    .map(([name, size]) => `${LETTERS[name] ?? name} ${size}`)
    .join(" × ");

// What proposes drafts, the share of them that were right, and tokens per step of a request that verified some.
function draftsOf({ proposer, load }) {
  if (!proposer) return "–";
  if (!load?.num_verified_drafts) return `${proposer}: none verified`;
  const share = Math.round((100 * load.num_accepted_drafts) / load.num_verified_drafts);
  const tokens = 1 + load.num_accepted_drafts / load.num_draft_verifications;
  return `${proposer}: ${share} % right, ${tokens.toFixed(1)} tok/step`;
}

const engineOf = (pod, rank) => (pod.parallel_sizes.data_parallel_size ? `engine ${rank.engine} ` : "");

function rankLine(rank) {
  const total = rank.computing_s + rank.waiting_s + rank.delayed_s;
  const share = (seconds) => (total ? `${Math.round((100 * seconds) / total)} %` : "–");
  return (
    `rank ${rank.rank}: process ${rank.pid}, ${rank.device}, ${bytes(rank.resident_bytes)}; computing ` +
    `${share(rank.computing_s)}, waiting ${share(rank.waiting_s)}, without a core ${share(rank.delayed_s)}`
  );
}

function showLines(id, lines) {
  const list = byId(id);
  while (list.children.length > lines.length) list.lastChild.remove();
  lines.forEach((line, index) => setText(list.children[index] ?? list.appendChild(element("li")), line));
}

const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

// Per second; null where two reports of the same start of the pod are needed, and there are none.
function ratesOf(pod, before, passed) {
  const [now, old] = [pod.load, before?.load];
  if (!now || !old || !passed) return { prompt: null, output: null, kv: null };
  const per = (name) => (now[name] >= old[name] ? (now[name] - old[name]) / passed : null);
  return { prompt: per("num_prompt_tokens"), output: per("num_generation_tokens"), kv: per("kv_bytes_loaded") };
}

function note(text) {
  const item = element("li");
  const time = new Date();
  const stamp = element("time", time.toLocaleTimeString());
  stamp.dateTime = time.toISOString();
  item.append(stamp, ` ${text}`);
  const list = byId("events");
  list.prepend(item);
  while (list.children.length > MAX_EVENTS) list.lastChild.remove();
}
