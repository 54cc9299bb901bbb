"""A chat page of one's own in front of the OpenAI-compatible API, all from Python.

Run it: python examples/chat_page.py [MODEL] [PORT], then open http://127.0.0.1:8000/
"""

from __future__ import annotations

import asyncio
import sys

from fastapi.responses import HTMLResponse

from pipelined.llm import AsyncLLM, EngineConfig
from pipelined.serving import ServerSettings, create_app

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Chat</title>
<style>
  :root { color-scheme: light dark; font: 16px/1.5 system-ui; }
  body { max-width: 42rem; margin: 0 auto; padding: 1rem; }
  p { white-space: pre-wrap; margin: .5rem 0; } .user { font-weight: 600; }
  form { display: flex; gap: .5rem; position: sticky; bottom: 0; padding: .5rem 0; background: Canvas; }
  input { flex: 1; font: inherit; padding: .5rem; }  button { font: inherit; }
</style>
<main id="log" aria-live="polite"></main>
<form id="form"><input id="text" autocomplete="off" placeholder="Say something" aria-label="Message" autofocus>
<button>Send</button></form>
<script>
const messages = [];
const say = (role) => Object.assign(log.appendChild(document.createElement("p")), {className: role});
form.onsubmit = async (event) => {
  event.preventDefault();
  if (!text.value) return;
  messages.push({role: "user", content: text.value});
  say("user").textContent = text.value;
  text.value = "";
  const answer = {role: "assistant", content: ""}, shown = say("assistant");
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: {"Content-Type": "application/json"},
    body: JSON.stringify({messages, stream: true, max_tokens: 512, stream_options: {include_progress: true}})});
  if (!response.ok) { shown.textContent = (await response.json()).error.message; messages.pop(); return; }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {value, done} = await reader.read();
    if (done) break;
    const events = (rest + value).split("\\n\\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const data = JSON.parse(event.slice(6));
      if (data.error) shown.textContent += " [" + data.error.message + "]";
      if (data.progress) shown.textContent = `reading ${data.progress.done} of ${data.progress.total} tokens ...`;
      for (const choice of data.choices ?? []) {
        answer.content += choice.delta.content ?? "";
        shown.textContent = answer.content;
      }
    }
  }
  messages.push(answer);
};
</script></html>"""


async def main(model: str = "smollm2", port: str = "8000") -> None:
    import uvicorn

    settings = ServerSettings(port=int(port))
    engine = AsyncLLM(EngineConfig(model=model, pp_size=2, recover=True))
    async with engine:
        app = create_app(engine, settings)

        @app.get("/", response_class=HTMLResponse)
        async def page() -> str:
            return PAGE

        print(f"open {settings.url}/", flush=True)
        await uvicorn.Server(uvicorn.Config(app, port=settings.port, log_level="warning")).serve()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
