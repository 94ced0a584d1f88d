"""The only place that touches private attributes of agent-lightning, VERL and torchdata (overridden methods aside).

Each access says why there is no public way. `tests/agl/internals` fail clearly when a version changes one.
"""

from agl_async_ckpt.agl.internals.configs import overridden
from agl_async_ckpt.agl.internals.dataset import index_values, stored_table
from agl_async_ckpt.agl.internals.loader import (
    draws_each_row_once,
    is_exhausted,
    loaded_loader_state,
    loader_state,
    next_rows,
    read_ahead,
    require_stateful_sampler,
    reset_loader,
    restore_loader,
    stateful_parts,
)
from agl_async_ckpt.agl.internals.process import (
    WRITER_PACKAGES,
    generators_kept,
    require_sole_writer,
    rng_state,
    set_rng_state,
    written_by,
)
from agl_async_ckpt.agl.internals.protocols import Config, RolloutManager, Trainer, TrainerSection, methods_of
from agl_async_ckpt.agl.internals.rollouts import (
    calls_hooks,
    default_rollout_config,
    event,
    fetch_events,
    has_ended,
    has_failed,
    hooks_act,
    is_listed,
    post_rollouts,
    recorded_event,
    rollout_manager,
    rollout_record,
    rollouts_per_group,
    triplet_form,
    with_mixin,
    with_model_request,
)
from agl_async_ckpt.agl.internals.saved_models import WorkerLists, numbers_to_keep
from agl_async_ckpt.agl.internals.server import (
    ENDED,
    GATEWAY_STATE_URL,
    MODELS_URL,
    NUM_PROXIED,
    ROLLOUTS_URL,
    STATES,
    posts_event,
    rollout_of,
    subject_of,
)
from agl_async_ckpt.agl.internals.start import (
    HOOK_KEY,
    PLUGIN_VARIABLE,
    RUNTIME_ENV,
    TRAINER_CLASS,
    TRAINER_MODULE,
    UPSTREAM_HOOK,
    around_ray_init,
    hook_of_job,
    is_plugin,
    job_may_be_overridden,
    worker_environment,
)
from agl_async_ckpt.agl.internals.trainer import (
    agl_client,
    async_batch_size,
    buffered_batch,
    carry_over,
    enqueued_rollout,
    found_no_rows,
    group_size,
    has_hooks,
    is_async,
    joined_column,
    renew_enqueued,
    set_buffered_batch,
    set_carry_over,
    starts_training,
    train_batch_size,
    trained_ids,
)
from agl_async_ckpt.agl.internals.verl import (
    capacity_expires,
    finish_background_save,
    loading,
    loads_from_hdfs,
    once_models_are_written,
    saves_asynchronously,
    step_folder,
)
from agl_async_ckpt.agl.internals.versions import TESTED, require_known_versions
