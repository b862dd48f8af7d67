"""A small live page over a run folder, and the same figures for Prometheus.

It reads the folder and nothing else, so that it can neither disturb a run nor be disturbed by one.  At an address of this machine alone it
is open; at any other it wants a token.
"""

from __future__ import annotations

import html
import json
import secrets
import time
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..core.ledger import Ledger
from ..core.recipe import RecipeError

LOCAL = ("127.0.0.1", "::1", "localhost")


def snapshot(folder: Path) -> dict[str, Any]:
    """What the page shows: state, rounds, and of every client its last round, bytes, and why it was missed.

    Raises:
        RecipeError: no run folder.
    """
    try:
        recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{folder} is not a run folder: {error}") from None
    rows = Ledger(folder / "ledger.jsonl").rows()
    status = _json(folder / "status.json") or {}
    finished = (folder / "result.json").exists() and len(rows) >= int(recipe.get("rounds", 0))
    state = status.get("state") or ("finished" if finished else "running" if rows else "waiting")
    clients = sorted({int(c) for r in rows for c in r["cohort"]} | set(range(len(status.get("clients", [])))))
    names = dict(enumerate(status.get("clients", [])))
    about = {c: {"name": names.get(c, f"client {c}"), "last": None, "up": 0, "down": 0, "missed": 0, "why": ""} for c in clients}
    rounds = []
    for r in rows:
        for way in ("up", "down"):
            for c, (_, wire) in r[way].items():
                about[int(c)][way] += wire
        for c in r["cohort"]:
            why = r["missing"].get(str(c))
            if why is None:
                about[c] |= {"last": r["round"], "why": ""}
            else:
                about[c] |= {"missed": about[c]["missed"] + 1, "why": why}
        score = {w: r["evaluation"].get(w, {}).get("accuracy") for w in ("global", "personal")} if r["evaluation"] else {}
        rounds.append(
            {
                "round": r["round"],
                "global": score.get("global"),
                "personal": score.get("personal"),
                "up": sum(s[1] for s in r["up"].values()),
                "down": sum(s[1] for s in r["down"].values()),
                "epsilon": r["metrics"].get("epsilon"),
                "loss": r["metrics"].get("loss"),
                "seconds": r["seconds"],
                "cohort": r["cohort"],
                "missing": r["missing"],
            }
        )
    return {
        "name": str(recipe.get("name", folder.name)),
        "method": str(recipe.get("method", {}).get("kind", "fedavg")),
        "state": state,
        "why": str(status.get("why", "")),
        "total": int(recipe.get("rounds", 0)),
        "rounds": rounds,
        "clients": list(about.values()),
        "numbers": clients,
        "age": round(time.time() - (folder / "ledger.jsonl").stat().st_mtime, 1) if rows else None,
    }


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def prometheus(of: dict[str, Any]) -> str:
    """The snapshot in Prometheus' text format."""
    run = f'run="{_label(of["name"])}"'
    lines: list[str] = []

    def metric(name: str, kind: str, help_: str, values: list[tuple[str, Any]]) -> None:
        found = [(labels, v) for labels, v in values if v is not None]
        if found:
            lines.extend([f"# HELP isthmus_{name} {help_}", f"# TYPE isthmus_{name} {kind}"])
            lines.extend(f"isthmus_{name}{{{labels}}} {v}" for labels, v in found)

    rounds = of["rounds"]
    latest = lambda key: next((r[key] for r in reversed(rounds) if r[key] is not None), None)  # noqa: E731
    metric("rounds_done", "gauge", "Rounds in the ledger.", [(run, len(rounds))])
    metric("rounds_planned", "gauge", "Rounds of the recipe.", [(run, of["total"])])
    states = ("waiting", "running", "finished", "failed", "stopped")
    metric("state", "gauge", "1 for the state that the run is in.", [(f'{run},state="{s}"', int(of["state"] == s)) for s in states])
    metric("accuracy", "gauge", "Latest accuracy.", [(f'{run},model="{w}"', latest(w)) for w in ("global", "personal")])
    metric("epsilon", "gauge", "Privacy spent.", [(run, latest("epsilon"))])
    metric("bytes_total", "counter", "Bytes on the wire.", [(f'{run},direction="{w}"', sum(r[w] for r in rounds)) for w in ("up", "down")])
    refused = lambda r: sum(why.startswith("refused") for why in r["missing"].values())  # noqa: E731
    metric("refused_total", "counter", "Updates that were refused.", [(run, sum(map(refused, rounds)))])
    each = [(f'{run},client="{_label(c["name"])}"', c) for c in of["clients"]]
    metric("client_missed_total", "counter", "Rounds that a client was invited to and not counted in.", [(k, c["missed"]) for k, c in each])
    metric("client_last_round", "gauge", "The last round that a client was counted in.", [(k, c["last"]) for k, c in each])
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Isthmus: %(title)s</title><style>
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:64rem;margin:1.5rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:1.6rem 0 .4rem;border-bottom:1px solid #ddd}
.quiet{color:#666}.tiles{display:flex;flex-wrap:wrap;gap:.8rem;margin:1rem 0}.tile{border:1px solid #e2e2e2;border-radius:.4rem;padding:.5rem .9rem;min-width:7.5rem}
.tile b{display:block;font-size:1.3rem;font-weight:600}.tile span{color:#666;font-size:.85rem}
#state{display:inline-block;border-radius:1rem;padding:0 .7rem;font-size:.9rem;margin-left:.6rem;background:#e8e8e8}
#state.running{background:#d9ebf7;color:#0d4a77}#state.finished{background:#dcefe3;color:#1f5b38}#state.failed,#state.stopped{background:#f7dfd8;color:#8c2f13}
table{border-collapse:collapse;width:100%%}td,th{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #eee;white-space:nowrap}
td:first-child,th:first-child,th:nth-child(2){text-align:left}td:first-child,th:first-child{padding-left:0}th{color:#555;font-weight:600}td.why{text-align:left;white-space:normal;color:#8a4b08;max-width:24rem}
td.cells{text-align:left;white-space:normal;line-height:0}i{display:inline-block;width:9px;height:14px;margin:1px;border-radius:2px;background:#eee}
i.ok{background:#3d8f63}i.missing{background:#d9a441}i.refused{background:#c0452a}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(19rem,1fr));gap:1rem}svg{width:100%%;height:11rem}svg text{font-size:11px;fill:#666}
</style></head><body><h1><span id="name"></span><span id="state"></span></h1><p class="quiet" id="line"></p>
<div class="tiles" id="tiles"></div><div class="charts" id="charts"></div>
<h2>Clients</h2><table><thead><tr><th>client</th><th>last 30 rounds</th><th>last</th><th>missed</th><th>sent</th><th>received</th><th></th></tr></thead><tbody id="clients"></tbody></table>
<p class="quiet"><i class="ok"></i> counted <i class="missing"></i> missed <i class="refused"></i> refused <i></i> not invited</p>
<h2>Missed and refused</h2><table><tbody id="refused"></tbody></table>
<script nonce="%(nonce)s">
const $=id=>document.getElementById(id),el=(tag,text,cls)=>{const e=document.createElement(tag);if(text!==undefined)e.textContent=text;if(cls)e.className=cls;return e};
const size=n=>{for(const u of['B','kB','MB','GB','TB']){if(n<1000||u==='TB')return(u==='B'?n:n.toFixed(1))+' '+u;n/=1000}};
const percent=v=>v==null?'\\u2013':(100*v).toFixed(1)+' %%';
function chart(title,series,format){
 const w=380,h=170,l=46,b=24,svg=document.createElementNS('http://www.w3.org/2000/svg','svg');svg.setAttribute('viewBox',`0 0 ${w} ${h}`);
 const add=(tag,at,text)=>{const e=document.createElementNS('http://www.w3.org/2000/svg',tag);for(const k in at)e.setAttribute(k,at[k]);if(text!==undefined)e.textContent=text;svg.append(e);return e};
 const points=series.flatMap(s=>s.points).filter(p=>p[1]!=null);if(!points.length)return null;
 const xs=points.map(p=>p[0]),ys=points.map(p=>p[1]),x1=Math.max(...xs,1),y0=Math.min(...ys),y1=Math.max(...ys),span=(y1-y0)||1,low=y0-span*.05,high=y1+span*.05;
 const X=x=>l+(w-l-8)*(x/x1),Y=y=>h-b-(h-b-22)*((y-low)/(high-low));
 for(const y of[y0,(y0+y1)/2,y1]){add('line',{x1:l,x2:w-8,y1:Y(y),y2:Y(y),stroke:'#eee'});add('text',{x:l-4,y:Y(y)+4,'text-anchor':'end'},format(y))}
 add('text',{x:l,y:h-6},'0');add('text',{x:w-8,y:h-6,'text-anchor':'end'},x1);add('text',{x:4,y:12},title);
 series.forEach((s,i)=>{const p=s.points.filter(q=>q[1]!=null);if(!p.length)return;
  add('polyline',{points:p.map(q=>X(q[0])+','+Y(q[1])).join(' '),fill:'none',stroke:s.colour,'stroke-width':2});
  const e=p[p.length-1];add('circle',{cx:X(e[0]),cy:Y(e[1]),r:3,fill:s.colour});add('text',{x:w-8,y:12+13*i,'text-anchor':'end',style:'fill:'+s.colour},s.name)});
 return svg}
function show(d){
 $('name').textContent=d.name;$('state').textContent=d.state;$('state').className=d.state;document.title=d.rounds.length+'/'+d.total+' '+d.name;
 $('line').textContent=d.method+(d.why?', '+d.why:'')+(d.state==='running'&&d.age!=null?', last round '+Math.round(d.age)+' s ago':'');
 const last=k=>{for(let i=d.rounds.length-1;i>=0;i--)if(d.rounds[i][k]!=null)return d.rounds[i][k];return null},sum=k=>d.rounds.reduce((a,r)=>a+r[k],0);
 const refused=d.rounds.reduce((a,r)=>a+Object.values(r.missing).filter(w=>w.startsWith('refused')).length,0);
 const tiles=[['rounds',d.rounds.length+' of '+d.total],['accuracy, global',percent(last('global'))],['accuracy, personal',percent(last('personal'))],['sent by clients',size(sum('up'))],['received',size(sum('down'))],['refused updates',refused]];
 if(last('epsilon')!=null)tiles.push(['epsilon spent',last('epsilon').toFixed(2)]);
 $('tiles').replaceChildren(...tiles.map(([n,v])=>{const t=el('div',undefined,'tile');t.append(el('b',v),el('span',n));return t}));
 const line=(k,name,colour)=>({name,colour,points:d.rounds.map(r=>[r.round+1,r[k]])});let total=0;
 const bytes={name:'up and down',colour:'#1b6ca8',points:d.rounds.map(r=>[r.round+1,total+=r.up+r.down])};
 $('charts').replaceChildren(...[chart('accuracy',[line('global','global','#1b6ca8'),line('personal','personal','#d1603d')],percent),chart('bytes',[bytes],size),
  chart('training loss',[line('loss','loss','#3d8f63')],v=>v.toPrecision(3)),chart('epsilon',[line('epsilon','epsilon','#8a5fa8')],v=>v.toFixed(2))].filter(Boolean));
 const recent=d.rounds.slice(-30);
 $('clients').replaceChildren(...d.clients.map((c,i)=>{const row=el('tr'),cells=el('td',undefined,'cells'),number=d.numbers[i];row.append(el('td',c.name),cells);
  for(const r of recent){const why=r.missing[number],e=el('i',undefined,!r.cohort.includes(number)?'':why===undefined?'ok':why.startsWith('refused')?'refused':'missing');e.title='round '+r.round+(why?': '+why:'');cells.append(e)}
  row.append(el('td',c.last==null?'\\u2013':c.last),el('td',c.missed),el('td',size(c.up)),el('td',size(c.down)),el('td',c.why,'why'));return row}));
 const bad=d.rounds.flatMap(r=>Object.entries(r.missing).map(([c,w])=>[r.round,c,w])).slice(-30).reverse();
 $('refused').replaceChildren(...(bad.length?bad:[['','','none so far']]).map(([r,c,w])=>{const row=el('tr');row.append(el('td',r===''?'':'round '+r),el('td',c===''?'':d.clients[d.numbers.indexOf(+c)].name),el('td',w,'why'));return row}))}
async function look(){try{const r=await fetch('data.json'+location.search,{cache:'no-store'});if(r.ok)show(await r.json());else $('line').textContent='the page answers '+r.status}catch(e){$('state').textContent='gone';$('state').className='failed'}setTimeout(look,1000)}
look();
</script></body></html>"""


class Watch(ThreadingHTTPServer):
    """The page of one run folder.

    Args:
        folder: the run.
        host, port: where to listen; port 0 takes a free one.
        token: wanted from everybody; made up where ``host`` is not this machine alone.

    Raises:
        RecipeError: no run folder.
    """

    daemon_threads = True

    def __init__(self, folder: Path, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        snapshot(folder)
        self.folder, self.token = folder, token or (None if host in LOCAL else secrets.token_urlsafe(24))
        super().__init__((host, port), _Handler)
        self.local = host in LOCAL

    @property
    def url(self) -> str:
        """Where to look."""
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/" + (f"?token={self.token}" if self.token else "")


class _Handler(BaseHTTPRequestHandler):
    server: Watch
    server_version, sys_version = "isthmus", ""
    timeout = 10

    def do_GET(self) -> None:
        """Page, data, metrics; nothing else."""
        url = urlsplit(self.path)
        if self.server.local and (self.headers.get("Host", "").rsplit(":", 1)[0].strip("[]") not in LOCAL):
            return self._answer(421, "text/plain", "this page is for this machine alone")  # another name that was made to point here
        given = parse_qs(url.query).get("token", [""])[0] or self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.server.token and not secrets.compare_digest(given.encode(), self.server.token.encode()):
            return self._answer(403, "text/plain", "a token is needed: ?token=... or Authorization: Bearer ...")
        try:
            if url.path == "/":
                nonce = secrets.token_urlsafe(16)
                page = _PAGE % {"title": html.escape(self.server.folder.name), "nonce": nonce}
                return self._answer(200, "text/html; charset=utf-8", page, nonce)
            if url.path == "/data.json":
                return self._answer(200, "application/json", json.dumps(snapshot(self.server.folder)))
            if url.path == "/metrics":
                return self._answer(200, "text/plain; version=0.0.4; charset=utf-8", prometheus(snapshot(self.server.folder)))
        except RecipeError as error:
            return self._answer(503, "text/plain", str(error))
        return self._answer(404, "text/plain", "there are /, /data.json and /metrics")

    def _answer(self, code: int, kind: str, text: str, nonce: str = "") -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        script = f"'nonce-{nonce}'" if nonce else "'none'"
        self.send_header(
            "Content-Security-Policy", f"default-src 'none'; script-src {script}; style-src 'unsafe-inline'; connect-src 'self'"
        )
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Tokens are in addresses: nothing is logged."""
