"""`python -m vescale_optim`: see `vescale_optim.cli`."""

from vescale_optim.cli import main

raise SystemExit(main())
