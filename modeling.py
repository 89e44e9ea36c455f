"""The models: a file for each encoder, with a class for each head. Parameters have Hugging Face's
names and shapes.

    from modeling import BertConfig, BertForMaskedLM, TokenStream

    model = BertForMaskedLM(BertConfig(1000, 64, 2, 2, 128))
    stream = TokenStream.from_sequences([[2, 7, 9, 3], [2, 8, 3]])  # end to end, without padding
    logits = model(stream).prediction_logits  # [7, 1024]; the vocabulary is padded to 1024

`BertModel.from_pretrained(folder)` and `model.save_pretrained(folder, tokenizer)` read and write
model folders (bert_recipe/checkpoint/pretrained.py). What encoders share lies in
bert_recipe/model/: attention.py, loss.py, kernels/; encoders/base.py, what every encoder does;
encoders/heads.py, what every head does. To add an encoder: CONTRIBUTING.md.
"""

# The input of every model; padded input is taken, too
from bert_recipe.model.token_stream import TokenStream

# BERT: the file to read first
from bert_recipe.model.encoders.bert import BertConfig, BertModel, BertForMaskedLM
from bert_recipe.model.encoders.bert import BertForPreTraining, BertForSequenceClassification
from bert_recipe.model.encoders.bert import BertForTokenClassification, BertForQuestionAnswering
from bert_recipe.model.encoders.bert import BertForSentenceEmbedding

# ModernBERT: rotary positions, gated layers, local and global attention
from bert_recipe.model.encoders.modernbert import ModernBertConfig, ModernBertModel
from bert_recipe.model.encoders.modernbert import ModernBertForMaskedLM
from bert_recipe.model.encoders.modernbert import ModernBertForSequenceClassification
from bert_recipe.model.encoders.modernbert import ModernBertForTokenClassification
from bert_recipe.model.encoders.modernbert import ModernBertForQuestionAnswering
from bert_recipe.model.encoders.modernbert import ModernBertForSentenceEmbedding

# RoBERTa, XLM-RoBERTa and CamemBERT
from bert_recipe.model.encoders.roberta import RobertaConfig, RobertaModel, RobertaForMaskedLM
from bert_recipe.model.encoders.roberta import RobertaForSequenceClassification
from bert_recipe.model.encoders.roberta import RobertaForTokenClassification
from bert_recipe.model.encoders.roberta import RobertaForQuestionAnswering
from bert_recipe.model.encoders.roberta import RobertaForSentenceEmbedding

# DistilBERT
from bert_recipe.model.encoders.distilbert import DistilBertConfig, DistilBertModel
from bert_recipe.model.encoders.distilbert import DistilBertForMaskedLM
from bert_recipe.model.encoders.distilbert import DistilBertForSequenceClassification
from bert_recipe.model.encoders.distilbert import DistilBertForTokenClassification
from bert_recipe.model.encoders.distilbert import DistilBertForQuestionAnswering
from bert_recipe.model.encoders.distilbert import DistilBertForSentenceEmbedding

# ELECTRA: its discriminator, and its generator as ElectraForMaskedLM
from bert_recipe.model.encoders.electra import ElectraConfig, ElectraModel, ElectraForMaskedLM
from bert_recipe.model.encoders.electra import ElectraForSequenceClassification
from bert_recipe.model.encoders.electra import ElectraForTokenClassification
from bert_recipe.model.encoders.electra import ElectraForQuestionAnswering
from bert_recipe.model.encoders.electra import ElectraForSentenceEmbedding

# NeoBERT
from bert_recipe.model.encoders.neobert import NeoBertConfig, NeoBertModel, NeoBertForMaskedLM
from bert_recipe.model.encoders.neobert import NeoBertForSequenceClassification
from bert_recipe.model.encoders.neobert import NeoBertForTokenClassification
from bert_recipe.model.encoders.neobert import NeoBertForQuestionAnswering
from bert_recipe.model.encoders.neobert import NeoBertForSentenceEmbedding

# The classes by config and head, and the config in the content of a config.json
from bert_recipe.model.encoders.registry import MODELS, config_from_dict, make_model
