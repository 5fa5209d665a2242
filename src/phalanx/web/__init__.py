"""The dashboard over run folders: a read-only web server. Only this package imports starlette and uvicorn."""
