"""C++ kernels for CPUs: products in every format of weights, and attention.

`python -m ed_layers.native build` compiles the library, and `python -m ed_layers.native` prints its
state. Without the library, all computations use plain XLA. `ED_LAYERS_NATIVE=0` disables the
library.
"""

from typing import TYPE_CHECKING

from ed_infra.lazy import attach

if TYPE_CHECKING:
    from ed_layers.fixed_order import KernelChoice as KernelChoice
    from ed_layers.fixed_order import chosen_by as chosen_by
    from ed_layers.native import products as products
    from ed_layers.native import rows as rows
    from ed_layers.native.library import describe as describe
    from ed_layers.native.library import require_fixed_order as require_fixed_order
    from ed_layers.native.products import product as product
    from ed_layers.native.products import product_of_codes as product_of_codes

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "KernelChoice": "ed_layers.fixed_order",
        "chosen_by": "ed_layers.fixed_order",
        "describe": "ed_layers.native.library",
        "require_fixed_order": "ed_layers.native.library",
        "product": "ed_layers.native.products",
        "product_of_codes": "ed_layers.native.products",
        "products": "ed_layers.native.products:*",
        "rows": "ed_layers.native.rows:*",
    },
)
