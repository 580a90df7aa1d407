"""The actors that ranks find by their names: made by the first of them, and replaced by spares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from energon_lite.extras.cluster.ray_library import RayError, ray

_NAMESPACE = "energon_lite"
# How long a spare may take to answer.
_CLAIM_SEC = 5.0


class SharedActors:
    """Actors with names, as one rank knows them; all that lost one find the same in its place."""

    def __init__(self) -> None:
        self._lost: set[Any] = set()  # names, and ids of actors
        self._handles: list[Any] = []  # of what this rank made, which ends with them

    def take(
        self, group: str, name: str, make: Callable[..., Any], num_spares: int, *, is_last: bool
    ) -> Any:
        """Returns the actor of a name, the spare that took its place, or one that is made.

        Args:
            group: which spares may take its place.
            name: of the actor.
            make: makes an actor with some options.
            num_spares: how many there are to be.
            is_last: whether the rank has all of the others, so that spares may be made.
        """

        def made(name: str) -> Any:
            self._handles.append(make(name=name, namespace=_NAMESPACE, get_if_exists=True))
            return self._handles[-1]

        if (actor := self._found(name)) is None:
            for number, spare in self._spares_of(group):
                if self._claims(spare, name):
                    made(_spare_name(group, number + num_spares))
                    return spare
            actor = made(name)
        if (is_last or name in self._lost) and not [*self._spares_of(group)]:
            for number in range(num_spares):
                made(_spare_name(group, number))
        return actor

    def lose(self, name: str, actor: Any) -> None:
        """Looks for another actor from now on; the name of this one is free."""
        ray.kill(actor)
        self._lost |= {name, actor._actor_id}

    def _spares_of(self, group: str) -> Iterator[tuple[int, Any]]:
        start = _spare_name(group, "")
        known = ray.util.list_named_actors(all_namespaces=True)
        names = (own["name"] for own in known if own["namespace"] == _NAMESPACE)
        for number in sorted(int(name[len(start) :]) for name in names if name.startswith(start)):
            if (spare := self._found(_spare_name(group, number))) is not None:
                yield number, spare

    def _found(self, name: str) -> Any:
        try:
            actor = ray.get_actor(name, _NAMESPACE)
        except ValueError:  # there is none
            return None
        return None if actor._actor_id in self._lost else actor

    def _claims(self, spare: Any, name: str) -> bool:
        try:
            return bool(ray.get(spare.claim.remote(name, name in self._lost), timeout=_CLAIM_SEC))
        except RayError:
            return False


def _spare_name(group: str, number: int | str) -> str:
    return f"{group}/spare/{number}"
