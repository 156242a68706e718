"""The HTTP server: SGLang- and OpenAI-compatible endpoints over one scheduler.

Start at :func:`flashrec.front.serve.serve` (a process) or :func:`flashrec.server.app.create_app` (an ASGI
application). Nothing is imported here, so that prompts can be built without the web framework.
"""
