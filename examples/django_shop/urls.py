"""The addresses of the shop."""

from django.contrib import admin
from django.urls import path
from shop.views import order, total

urlpatterns = [
    path("admin/", admin.site.urls),
    path("orders", order),
    path("customers/<int:customer>/total", total),
]
