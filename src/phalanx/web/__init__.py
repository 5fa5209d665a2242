"""The dashboard over run folders: a read-only web server. Only this folder imports starlette and uvicorn."""
