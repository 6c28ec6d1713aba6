"""An MCP server on standard input and output, written with the package `mcp`."""

import os
import sys
import time

try:
    from mcp.server.mcpserver import MCPServer
except ImportError:  # the name before version 2
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("numbers")


@server.tool()
def multiply(first: int, second: int) -> str:
    """Multiplies two integers."""
    return str(first * second)


@server.tool()
def fail(how: str) -> str:
    """Misbehaves."""
    if how == "hang":
        time.sleep(600)
    if how == "exit":
        os._exit(3)
    raise ValueError("no such number")


if __name__ == "__main__":
    if "--broken" in sys.argv:
        sys.exit("broken")
    server.run("stdio")
