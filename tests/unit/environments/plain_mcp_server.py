"""An MCP server that speaks the protocol without the package `mcp`, and does what the tools of real ones may do.

`python plain_mcp_server.py PAGES NAME...` lists the named tools, one per page; `endless` as PAGES lists more than there
are.
"""

import json
import sys

PAGES, *NAMES = sys.argv[1:]
TEXT = {"type": "text", "text": "fine"}
ANSWERS = {
    "resource": {"content": [TEXT, {"type": "resource", "resource": {"uri": "file:///a", "text": "of a file"}}]},
    "image": {"content": [{"type": "image", "data": "", "mimeType": "image/png"}]},
    "structured": {"content": [], "structuredContent": {"degrees": 21}},
    "nothing": {"content": []},
}
ERRORS = {"closed_file": (-32603, "the file is closed"), "own_code": (-32000, "Connection closed by the database")}


def tools(cursor):
    place = int(cursor or 0)
    listed = [{"name": name, "inputSchema": {"type": "object"}} for name in NAMES[place : place + 1]]
    is_last = PAGES != "endless" and place + 1 >= len(NAMES)
    return {"tools": listed} if is_last else {"tools": listed, "nextCursor": str(place + 1)}


def answer(method, params):
    if method == "initialize":
        info = {"name": "plain", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return tools(params.get("cursor"))
    return ANSWERS[params["name"]] if method == "tools/call" else {}


for line in sys.stdin:
    request = json.loads(line)
    params = request.get("params") or {}
    if params.get("name") == "hang" and request["method"] == "tools/call":
        sys.stdin.read()
    if "id" in request:
        reply = {"jsonrpc": "2.0", "id": request["id"]}
        if params.get("name") in ERRORS:
            code, message = ERRORS[params["name"]]
            reply["error"] = {"code": code, "message": message}
        else:
            reply["result"] = answer(request["method"], params)
        print(json.dumps(reply), flush=True)
