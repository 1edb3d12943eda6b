"""Print the OpenAPI document, for docs/openapi.json: `python -m relay.console.api`."""

import sys

from relay.console.api.openapi import as_text, document
from relay.console.api.router import router

sys.stdout.write(as_text(document(router.routes)))
