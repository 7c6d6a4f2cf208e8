"""Adapters by name: what a request's model means, and loading on all verifiers of a model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import PurePosixPath

import grpc.aio

from outrider.core.session.contract import Adapter
from outrider.errors import Conflict, Forbidden, InvalidRequest, NotFound, OutriderError
from outrider.rpc.status import from_rpc_error
from outrider.store.adapters import ALL, NamedAdapter, NamedAdapters
from outrider.store.registry import Worker
from outrider.wire import verifier as wire
from router.requests.served_models import RequestedModel, ServedModel
from router.scheduling.workers import WorkerPool

READ_S = 120.0  # the longest time that a verifier may take to read an adapter


class AdapterDirectory:
    """The adapters of a router's models. Methods raise Unavailable when Redis cannot be used."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        named: NamedAdapters,
        worker_pool: WorkerPool,
        loaders: tuple[str, ...],
        publishers: tuple[str, ...] = (),
    ) -> None:
        """`loaders`: tenants that may load and unload adapters; `publishers`: those of them whose adapters are for all
        tenants. *: all."""
        self._models = models
        self._named = named
        self._worker_pool = worker_pool
        self._loaders = loaders
        self._publishers = publishers

    async def resolve(self, tenant: str, name: str) -> RequestedModel:
        """Return the model and the adapter that a name means to a tenant: MODEL, ADAPTER or MODEL:ADAPTER.

        The tenant's own adapter comes before that of all tenants. A name that is neither is returned as it is, as that
        of a model: so is another tenant's.
        """
        if not name or name in self._models:
            return RequestedModel(name)
        model, _, own = name.rpartition(":")
        for owner in (tenant, ALL):
            found = await self._named.find(owner, own if model in self._models else name)
            if found is not None and model in ("", found.model):
                return RequestedModel(found.model, found.adapter)
        return RequestedModel(name)

    async def load(self, tenant: str, name: str, folder: str, model: str) -> NamedAdapter:
        """Have all verifiers of a model read an adapter, and store its name for the tenant, or for all.

        Raises Forbidden for a tenant that may not; InvalidRequest; NotFound; Unavailable without verifiers; Conflict
        where their files differ; and what a verifier raises.
        """
        self._check(tenant)
        if name in self._models:
            raise InvalidRequest("name", f"is {name!r}, the name of a model")
        owner = self._owner(tenant)
        folder = folder if owner in ("", ALL) else _folder_of(owner, folder)
        verifiers = await self._worker_pool.serving(model)
        read = await asyncio.gather(*(self._read(worker, model, folder) for worker in verifiers))
        if len({it.digest for it in read}) > 1:
            raise Conflict(f"adapter {folder!r} has other files on some verifiers; give all of them the same")
        named = NamedAdapter(name, model, Adapter(folder, read[0].digest.hex()), read[0].rank, read[0].parameters)
        await self._named.add(owner, named)
        return named

    async def unload(self, tenant: str, name: str) -> None:
        """Delete an adapter's name. Raises Forbidden for a tenant that may not; NotFound."""
        self._check(tenant)
        for owner in dict.fromkeys((tenant, self._owner(tenant))):  # it may have become a publisher since it loaded
            if await self._named.remove(owner, name):
                return
        raise NotFound(f"there is no adapter {name[:80]!r}")

    async def listed(self, tenant: str) -> list[NamedAdapter]:
        """Return all adapters of this router's models that a tenant may name, by name."""
        visible = {it.name: it for owner in (ALL, tenant) for it in await self._named.listed(owner)}
        return [it for _, it in sorted(visible.items()) if it.model in self._models]

    def _owner(self, tenant: str) -> str:
        """Return who may name the adapters that a tenant loads."""
        return ALL if ALL in self._publishers or tenant in self._publishers else tenant

    def _check(self, tenant: str) -> None:
        if ALL not in self._loaders and tenant not in self._loaders:
            raise Forbidden("only tenants that the routers' adapter_loaders name may load and unload adapters")

    async def _read(self, worker: Worker, model: str, folder: str) -> wire.ReadAdapterResponse:
        request = wire.ReadAdapterRequest(model=model, folder=folder)
        try:
            found: wire.ReadAdapterResponse = await wire.VerifierStub(
                self._worker_pool.channels.to(worker)
            ).ReadAdapter(request, timeout=READ_S)
        except grpc.aio.AioRpcError as error:
            known: OutriderError = from_rpc_error(error)
            raise known from None
        return found


def _folder_of(tenant: str, folder: str) -> str:
    """Return a tenant's folder below that of its name: nobody reads another tenant's files. Raises NotFound."""
    if ".." in PurePosixPath(folder).parts:
        raise NotFound(f"adapter {folder[:80]!r} is not here: no such folder")
    return f"{tenant}/{folder}"
