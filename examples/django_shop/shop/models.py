"""What the shop keeps."""

from typing import ClassVar

from django.db import models


class Order(models.Model):
    customer = models.BigIntegerField()
    amount = models.DecimalField(max_digits=12, decimal_places=2)

    class Meta:
        constraints: ClassVar = [models.CheckConstraint(condition=models.Q(amount__gt=0), name="amount_is_positive")]

    def __str__(self) -> str:
        return f"order {self.pk}"


class Total(models.Model):
    customer = models.BigIntegerField(primary_key=True)
    amount = models.DecimalField(max_digits=12, decimal_places=2)

    def __str__(self) -> str:
        return f"total of customer {self.customer}"
