"""Which pods there are: from a list, from DNS, from a registry, or from several of them together."""

from router.discovery.base import Discovery, Endpoint, Endpoints, Publish, Role
from router.discovery.static import StaticDiscovery

__all__ = ["Discovery", "Endpoint", "Endpoints", "Publish", "Role", "StaticDiscovery"]
