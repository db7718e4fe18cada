"""ddp_notebook installed beside the versions of others, in environments without anything of the checkout.

environments           makes such environments; the lists of Colab's and Kaggle's versions are in `tests/matrix`
execute                runs a notebook in one
"""
