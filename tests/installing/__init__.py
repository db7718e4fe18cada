"""ddp_notebook installed with other package versions, in environments without files of the checkout.

environments           creates these environments; the lists of Colab's and Kaggle's versions are in `tests/matrix`
execute                runs a notebook in one
"""
