"""The routes of `/api/v1`."""

from fastapi import APIRouter

router = APIRouter(prefix="/api/v1")
