"""What recommendations are worth: any engine on held-out histories, alone or against another."""

from __future__ import annotations
