"""The routes of `/api/v1`."""

from fastapi import APIRouter

from relay.console.api import openapi, parked, quarantine, replay, state
from relay.console.api.openapi import PREFIX

router = APIRouter(prefix=PREFIX, responses={422: {"description": "Unprocessable"}})
for each in (state, parked, quarantine, replay, openapi):
    router.include_router(each.router)
