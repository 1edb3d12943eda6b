"""The pages of the shop, for programs."""

from decimal import Decimal, InvalidOperation

from django.core.exceptions import BadRequest
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from .orders import place_order, total_of


@csrf_exempt
@require_POST
def order(request: HttpRequest) -> JsonResponse:
    try:
        customer, amount = int(request.POST["customer"]), Decimal(request.POST["amount"])
    except (KeyError, ValueError, InvalidOperation) as error:
        raise BadRequest("an order has the fields customer and amount, which are numbers") from error
    return JsonResponse({"order": place_order(customer, amount).pk})


def total(_: HttpRequest, customer: int) -> JsonResponse:
    return JsonResponse({"total": str(total_of(customer))})
