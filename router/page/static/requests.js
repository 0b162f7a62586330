// The last requests, and where the time of one went.

import { count, element, getJson, ms, Poll, problemOf, seconds, setText } from "./api.js";

const byId = (id) => document.getElementById(id);
const LANES = [
  ["router", "Router"],
  ["prefill", "Prefill pod"],
  ["wire", "Wire"],
  ["decode", "Decode pod"],
];
const NUMBERS_FROM = 5; // columns of the table from here on are numbers

export class RequestsView {
  #poll = new Poll((signal) => this.#refresh(signal), 2000);
  #rows = new Map(); // id and start -> table row
  #opened = "";
  #isOver = false; // the opened one has ended: its timeline changes no more

  show(id, isNew) {
    if (id !== this.#opened || isNew) {
      this.#opened = id;
      this.#isOver = false;
      byId("timeline").hidden = true;
      this.#markOpened();
      if (id) this.#open(id);
    }
    this.#poll.start();
  }

  hide() {
    this.#poll.stop();
  }

  async #refresh(signal) {
    try {
      const { data, max_kept: kept } = await getJson("v1/requests?limit=100", signal);
      this.#list(data);
      const empty = kept ? "No request yet. Send one in the playground." : "No timelines are kept: max_timelines is 0.";
      setText(byId("requests-status"), data.length || this.#opened ? "" : empty);
      if (this.#opened && !this.#isOver && !byId("timeline").hidden) await this.#load(this.#opened, signal);
    } catch (error) {
      setText(byId("requests-status"), problemOf(error));
      throw error;
    }
  }

  async #open(id) {
    try {
      await this.#load(id, AbortSignal.timeout(10000));
      byId("timeline-title").focus({ preventScroll: true });
      byId("timeline").scrollIntoView({ block: "nearest" });
    } catch (error) {
      if (id === this.#opened) setText(byId("requests-status"), problemOf(error));
    }
  }

  async #load(id, signal) {
    const timeline = await getJson(`v1/requests/${encodeURIComponent(id)}`, signal);
    if (id !== this.#opened) return; // another one was opened meanwhile
    this.#isOver = ["finished", "failed"].includes(timeline.request.status);
    drawTimeline(timeline);
    byId("timeline").hidden = false;
  }

  // --- the list ---

  #list(requests) {
    const gone = new Set(this.#rows.keys());
    let after = null;
    for (const request of requests) {
      const key = `${request.id} ${request.started_at}`;
      gone.delete(key);
      let row = this.#rows.get(key);
      if (!row) {
        row = newRow(request.id);
        this.#rows.set(key, row);
      }
      const place = after ? after.nextSibling : byId("recent").firstChild;
      if (place !== row) byId("recent").insertBefore(row, place);
      after = row;
      cellsOf(request).forEach((text, index) => setText(row.children[index + 1], text));
      row.dataset.status = request.status;
    }
    for (const key of gone) {
      this.#rows.get(key).remove();
      this.#rows.delete(key);
    }
    this.#markOpened();
  }

  #markOpened() {
    for (const row of this.#rows.values()) {
      const link = row.querySelector("a");
      if (link.textContent === this.#opened) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }
}

function newRow(id) {
  const row = element("tr");
  const head = element("th");
  head.scope = "row";
  const link = element("a", id);
  link.href = `#requests/${encodeURIComponent(id)}`;
  head.append(link);
  row.append(head);
  for (let column = 1; column <= 10; column += 1) row.append(element("td", "", column >= NUMBERS_FROM ? "number" : ""));
  return row;
}

function cellsOf(request) {
  const how = request.error || request.finish_reason;
  return [
    new Date(request.started_at).toLocaleTimeString(),
    request.model,
    request.tenant || "–",
    request.status + (how ? `: ${how}` : "") + (request.num_events ? ", with fallbacks" : ""),
    count(request.num_prompt_tokens),
    count(request.num_cached_tokens),
    count(request.num_output_tokens),
    ms(request.ttft_ms),
    ms(request.longest_gap_ms),
    ms(request.duration_ms),
  ];
}

// --- a timeline ---

function drawTimeline({ request, phases, events, gaps, num_left_out: leftOut }) {
  setText(byId("timeline-title"), `Request ${request.id}`);
  const route = phases.findLast((phase) => phase.name === "route");
  drawFigures([
    ["Status", request.status + (request.error ? `: ${request.error}` : "")],
    ["First token", request.ttft_ms === null ? "–" : seconds(request.ttft_ms)],
    ["Total", seconds(request.duration_ms)],
    ["Longest gap", gaps ? `${seconds(gaps.longest_ms)}, before token ${gaps.longest_before_token}` : "–"],
    ["Route reason", route?.reason || "–"],
    ["Fallbacks", String(events.length)],
    ["Drafts right", draftsOf(request)],
  ]);
  drawLanes(phases, events, gaps, request.duration_ms);
  drawPhases(phases);
  drawFallbacks(events, leftOut);
  drawGaps(gaps);
}

const draftsOf = ({ num_verified_drafts: verified, num_accepted_drafts: accepted }) =>
  verified ? `${count(accepted)} of ${count(verified)}` : "–";

const laneOf = (phase) => (phase.name === "transfer" ? "wire" : phase.where);
const words = (name) => name.replaceAll("_", " ");

function drawFigures(figures) {
  byId("timeline-figures").replaceChildren(
    ...figures.map(([name, value]) => {
      const box = element("div");
      box.append(element("dt", name), element("dd", value));
      return box;
    }),
  );
}

function drawLanes(phases, events, gaps, totalMs) {
  const total = totalMs || 1;
  const place = (node, startMs, durationMs) => {
    node.style.setProperty("--from", String(startMs / total));
    node.style.setProperty("--size", String(durationMs / total));
    return node;
  };
  const lanes = LANES.map(([lane, title]) => {
    const track = element("div", "", "track");
    for (const phase of phases.filter((each) => laneOf(each) === lane && each.name !== "route")) {
      const bar = element("span", words(phase.name), "bar");
      bar.dataset.phase = phase.name;
      bar.title = `${words(phase.name)}: ${seconds(phase.duration_ms)}, from ${seconds(phase.start_ms)} on`;
      track.append(place(bar, phase.start_ms, phase.duration_ms));
    }
    if (lane === "router") {
      for (const event of events) {
        const mark = place(element("span", "", "mark"), event.at_ms, 0);
        mark.title = `${words(event.event)}: ${words(event.reason)}`;
        track.append(mark);
      }
    }
    if (lane === "decode" && gaps) {
      const gap = place(element("span", "", "gap"), gaps.longest_at_ms, gaps.longest_ms);
      gap.title = `longest gap: ${seconds(gaps.longest_ms)}`;
      track.append(gap);
    }
    const row = element("div", "", "lane");
    row.append(element("span", title, "lane-name"), track);
    return row;
  });
  const axis = element("div", "", "axis");
  axis.append(element("span", "0"), element("span", seconds(totalMs / 2)), element("span", seconds(totalMs)));
  byId("lanes").replaceChildren(...lanes, axis);
  const drawn = phases.filter((phase) => phase.name !== "route");
  const parts = drawn.map((phase) => `${words(phase.name)} ${seconds(phase.duration_ms)}`);
  byId("lanes").setAttribute("aria-label", `Timeline: ${parts.join(", ")}. The table below has the same.`);
}

function drawPhases(phases) {
  byId("phases").replaceChildren(
    ...phases.map((phase) => {
      const row = element("tr");
      const head = element("th", words(phase.name));
      head.scope = "row";
      row.append(
        head,
        element("td", laneOf(phase)),
        element("td", phase.pod ?? "–"),
        element("td", phase.attempt === null ? "–" : String(phase.attempt), "number"),
        element("td", phase.start_ms.toFixed(2), "number"),
        element("td", phase.duration_ms.toFixed(2), "number"),
        element("td", words(phase.reason ?? "–")),
      );
      return row;
    }),
  );
}

function drawFallbacks(events, leftOut) {
  const lines = events.map(({ at_ms: at, event, reason, pod }) =>
    [`${seconds(at)}: ${words(event)}`, words(reason), pod].filter(Boolean).join(", "),
  );
  if (leftOut) lines.push(`${leftOut} more are not kept`);
  byId("fallbacks").replaceChildren(...lines.map((line) => element("li", line)));
  byId("fallbacks-box").hidden = !lines.length;
}

function drawGaps(gaps) {
  byId("gaps-box").hidden = !gaps;
  if (!gaps) return;
  const most = Math.max(1, ...gaps.counts);
  const items = gaps.counts.map((number, index) => {
    const upper = gaps.upper_ms[index];
    const text = upper === undefined ? `over ${seconds(gaps.upper_ms.at(-1))}` : `up to ${seconds(upper)}`;
    const item = element("li");
    const bar = element("span", "", "meter");
    bar.setAttribute("aria-hidden", "true");
    bar.style.setProperty("--share", String(number / most));
    item.append(element("span", text), bar, element("span", count(number), "number"));
    item.hidden = !number;
    return item;
  });
  byId("gap-bars").replaceChildren(...items);
}
